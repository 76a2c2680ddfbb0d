// All requests, found by ticket or id: adds them to the scheduler, ends each once, and says what
// their sinks are told. What a step computes, and when, is decided elsewhere.
#ifndef ISOBIT_ROLLOUT_REQUEST_TABLE_H_
#define ISOBIT_ROLLOUT_REQUEST_TABLE_H_

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
#include "rollout/emitter.h"
#include "rollout/kv_pages.h"
#include "rollout/request.h"
#include "rollout/scheduler.h"
#include "rollout/speculation.h"

namespace isobit {

struct QueueLimits {
  size_t max_waiting_requests = 0;
  int64_t max_waiting_tokens = 0;  // of prompts; an empty queue takes a request of any length
};

struct PageLimits {
  int32_t num_pages = 0;
  int32_t page_size = 0;   // tokens
  int32_t max_cached = 0;  // pages of prefixes that nobody uses
};

// Requests and sequences that have ended, but that a step in flight may still point to.
struct EndedRequests {
  std::vector<std::unique_ptr<Request>> requests;
  std::vector<std::unique_ptr<SequenceSampling>> samplings;
  void clear();
};

// Not thread-safe: the engine's mutex guards every call except ended(). Only the engine thread ends
// requests and commits tokens, since that emits, and may end what is in flight.
class RequestTable {
 public:
  using Clock = std::chrono::steady_clock;

  // `version`: of the weights that serve, null before the first load. `outbox`: takes the calls to
  // sinks. These and `speculation` outlive the table.
  RequestTable(const SchedulerLimits& scheduler, const QueueLimits& queue, const PageLimits& pages,
               const std::shared_ptr<const WeightVersion>& version, std::vector<Emission>& outbox,
               Speculation& speculation);

  // OK if a request of that id may be added, `tokens` being the prompt's length times n.
  // UNAVAILABLE: no weights yet. ALREADY_EXISTS: the id is in flight. RESOURCE_EXHAUSTED: the queue
  // is full.
  absl::Status CheckQueue(const std::string& id, int64_t tokens) const;

  // Queues the request and returns its ticket.
  uint64_t Add(std::unique_ptr<Request> request);

  // Marks a request, so that EndDue ends it. False: there is no such request.
  bool Cancel(uint64_t ticket, const std::string& reason);
  // Likewise for several ids; if `client` is given, only for that client's requests. Returns the
  // ids that this call has marked.
  std::vector<std::string> Abort(absl::Span<const std::string> ids,
                                 const std::optional<std::string>& client);

  // Ends requests that are marked or have expired, with kAbort and the tokens committed so far.
  void EndDue(Clock::time_point now);
  // Ends all requests with kAbort. Returns their number.
  size_t AbortAll(const std::string& reason);
  // Ends all requests with an error; their samples get no end.
  void FailAll(const absl::Status& status);

  // Appends what a step has drawn for a sequence that has not ended, which may end with it: the
  // first draw, and those behind guesses as long as the guesses are what was drawn. A result that
  // is not finite marks the request as failed.
  void CommitDraws(Sequence& sequence, absl::Span<LogProbResult> draws);
  // What a step has drawn for a sequence that has not ended, to be verified.
  void CommitCandidate(Sequence& sequence, const LogProbResult& draw);
  // Of the requests of these sequences, closes those that have failed or have no unfinished sample.
  void CloseFinished(absl::Span<Sequence* const> sequences);

  // No sequence will find what earlier weights have computed.
  void ForgetPrefixes() { pages_.Forget(); }

  // What has ended since StepPipeline::Keep last took it. For the engine thread alone.
  EndedRequests& ended() { return ended_; }

  std::vector<std::string> ids() const;
  size_t size() const { return requests_.size(); }
  size_t num_with_cache() const;  // requests that have a sequence with keys in its pages
  // No request expires before this time; the first may expire later.
  Clock::time_point next_expiry() const { return next_expiry_; }
  Scheduler& scheduler() { return scheduler_; }
  const Scheduler& scheduler() const { return scheduler_; }
  const KvPages& pages() const { return pages_; }

 private:
  using Requests = std::map<uint64_t, std::unique_ptr<Request>>;  // by ticket: oldest first

  void CommitToken(Sequence& sequence, LogProbResult& result);
  void EndSequence(Sequence& sequence, SampleEnd end);
  // Ends what is left of the request with kAbort, then closes it with OK.
  Requests::iterator Abort(Requests::iterator request, const std::string& reason);
  // Forgets the request, frees what is left of it and emits OnDone.
  Requests::iterator Close(Requests::iterator request, const absl::Status& status);

  const QueueLimits limits_;
  const std::shared_ptr<const WeightVersion>& version_;
  std::vector<Emission>& outbox_;
  Speculation& speculation_;
  KvPages pages_;
  Scheduler scheduler_;
  Requests requests_;
  std::unordered_map<std::string, uint64_t> tickets_;  // by request id
  uint64_t next_ticket_ = 1;
  Clock::time_point next_expiry_ = Clock::time_point::max();
  EndedRequests ended_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_REQUEST_TABLE_H_
