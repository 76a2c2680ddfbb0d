// All requests, found by ticket or id. It adds them to the scheduler, ends each once, and decides
// what their sinks are told. What a step computes, and when, is decided elsewhere.
#ifndef ISOBIT_ROLLOUT_ENGINE_REQUEST_TABLE_H_
#define ISOBIT_ROLLOUT_ENGINE_REQUEST_TABLE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "rollout/engine/emitter.h"
#include "rollout/schedule/guesser.h"
#include "rollout/schedule/request.h"
#include "rollout/schedule/scheduler.h"
#include "rollout/schedule/state_pool.h"

namespace isobit {

struct QueueLimits {
  size_t max_waiting_requests = 0;
  int64_t max_waiting_tokens = 0;  // of prompts; an empty queue takes a request of any length
};

// Ended requests and sequences to which a step in flight may still point.
struct EndedRequests {
  std::vector<std::unique_ptr<Request>> requests;
  std::vector<std::unique_ptr<SequenceSampling>> samplings;
  void clear();
};

// Not thread-safe: the engine's mutex guards every call except ended(). Only the engine thread ends
// requests and commits tokens, since that emits and may end requests of a step in flight.
class RequestTable {
 public:
  using Clock = std::chrono::steady_clock;

  // `version`: of the weights that serve, null before the first load. `outbox`: takes the calls to
  // sinks. Both and `guesser`, which may be null, outlive the table.
  RequestTable(const SchedulerLimits& scheduler, const QueueLimits& queue, const PoolSize& pages,
               const std::shared_ptr<const WeightVersion>& version, std::vector<Emission>& outbox,
               Guesser* guesser = nullptr);

  // OK if a request of that id may be added. tokens: the prompt's length times n. UNAVAILABLE:
  // there are no weights yet. ALREADY_EXISTS: the id is in flight. RESOURCE_EXHAUSTED: the queue is
  // full.
  absl::Status CheckQueue(const std::string& id, int64_t tokens) const;

  // Queues the request and returns its ticket.
  uint64_t Add(std::unique_ptr<Request> request);

  // Marks a request for EndDue to end. False: there is no such request.
  bool Cancel(uint64_t ticket, const std::string& reason);
  // Likewise for several ids; with `client`, only for that client's requests. Returns the ids that
  // this call has marked.
  std::vector<std::string> Abort(absl::Span<const std::string> ids,
                                 const std::optional<std::string>& client);

  // Ends requests that are marked or expired, with kAbort and the tokens committed so far.
  void EndDue(Clock::time_point now);
  // Ends all requests with kAbort. Returns their number.
  size_t AbortAll(const std::string& reason);
  // Ends all requests with an error; their samples get no OnSampleEnd.
  void FailAll(const absl::Status& status);

  // Appends what a step has drawn for a sequence that has not ended: the first draw, and the draw
  // behind each guess as long as the guesses before it are what was drawn. The sequence may end
  // with it. A result that is not finite marks the request as failed.
  void CommitDraws(Sequence& sequence, absl::Span<LogProbResult> draws);
  // Adds a draw of a provisional step, to be verified, for a sequence that has not ended.
  void CommitCandidate(Sequence& sequence, const LogProbResult& draw);
  // Closes those requests of these sequences that have failed or have no unfinished sample.
  void CloseFinished(absl::Span<Sequence* const> sequences);

  // After this, no sequence finds what earlier weights have computed.
  void ForgetPrefixes() { pages_.Forget(); }

  // What has ended since StepPipeline::Keep last took it. Used by the engine thread alone.
  EndedRequests& ended() { return ended_; }

  std::vector<std::string> ids() const;
  size_t size() const { return requests_.size(); }
  size_t num_with_cache() const;  // requests with keys in the pages of a sequence
  // No request expires before this time, but the first may expire later.
  Clock::time_point next_expiry() const { return next_expiry_; }
  Scheduler& scheduler() { return scheduler_; }
  const Scheduler& scheduler() const { return scheduler_; }
  const StatePool& pages() const { return pages_; }

 private:
  using Requests = std::map<uint64_t, std::unique_ptr<Request>>;  // by ticket: oldest first

  void CommitToken(Sequence& sequence, LogProbResult& result);
  void EndSequence(Sequence& sequence, SampleEnd end);
  // Ends the rest of the request with kAbort, then closes it with OK.
  Requests::iterator Abort(Requests::iterator request, const std::string& reason);
  // Forgets the request, frees its sequences and emits OnDone.
  Requests::iterator Close(Requests::iterator request, const absl::Status& status);

  const QueueLimits limits_;
  const std::shared_ptr<const WeightVersion>& version_;
  std::vector<Emission>& outbox_;
  Guesser* const guesser_;
  StatePool pages_;
  Scheduler scheduler_;
  Requests requests_;
  std::unordered_map<std::string, uint64_t> tickets_;  // by request id
  uint64_t next_ticket_ = 1;
  Clock::time_point next_expiry_ = Clock::time_point::max();
  EndedRequests ended_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_ENGINE_REQUEST_TABLE_H_
