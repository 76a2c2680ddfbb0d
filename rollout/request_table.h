// The requests that exist: found by ticket and by id, queued and run by the scheduler, each ended
// once, and what their sinks are told of it. Not here: what is computed, and when.
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

namespace isobit {

struct QueueLimits {
  size_t max_waiting_requests = 0;
  int64_t max_waiting_tokens = 0;  // of prompts; an empty queue takes any one
};

// What has ended, but a step in flight may still point into it.
struct EndedRequests {
  std::vector<std::unique_ptr<Request>> requests;
  std::vector<std::unique_ptr<SequenceSampling>> samplings;
  void clear();
};

// Not thread-safe: the engine's mutex guards every call but ended(). What ends requests or commits
// tokens is called on the engine thread alone, since it emits, and what it ends may be in flight.
class RequestTable {
 public:
  using Clock = std::chrono::steady_clock;

  // `version`: of the weights that serve, null before the first load; `outbox`: where what sinks
  // are told goes. Both outlive the table.
  RequestTable(const SchedulerLimits& scheduler, const QueueLimits& queue, int32_t num_pages,
               int32_t page_size, const std::shared_ptr<const WeightVersion>& version,
               std::vector<Emission>& outbox);

  // Whether a request of that id, with `tokens` in all its prompts, may be added. UNAVAILABLE: no
  // weights yet. ALREADY_EXISTS: the id is in flight. RESOURCE_EXHAUSTED: the queue is full.
  absl::Status CheckQueue(const std::string& id, int64_t tokens) const;

  // Queues the request and returns its ticket.
  uint64_t Add(std::unique_ptr<Request> request);

  // Marks a request, for EndDue to end it. False: it is not there.
  bool Cancel(uint64_t ticket, const std::string& reason);
  // Likewise those that are there, and only those of `client` if one is given. Returns the ids that
  // were not marked before.
  std::vector<std::string> Abort(absl::Span<const std::string> ids,
                                 const std::optional<std::string>& client);

  // Ends those that are marked or have expired, with kAbort and what has been committed.
  void EndDue(Clock::time_point now);
  // Ends all of them with kAbort. Returns their number.
  size_t AbortAll(const std::string& reason);
  // Ends all of them with an error, and without another word of their samples.
  void FailAll(const absl::Status& status);

  // Appends a drawn token to a running sequence, which may end with it. A result that is not finite
  // marks the request as failed.
  void CommitToken(Sequence& sequence, LogProbResult& result);
  // Closes the requests of these sequences that have failed, or of which every sample has ended.
  void CloseFinished(absl::Span<Sequence* const> sequences);

  // What has ended since StepPipeline::Keep last took it. Of the engine thread alone.
  EndedRequests& ended() { return ended_; }

  std::vector<std::string> ids() const;
  size_t size() const { return requests_.size(); }
  size_t num_with_cache() const;  // that have a sequence with keys in its pages
  // No request expires before; it may be earlier than the first that does.
  Clock::time_point next_expiry() const { return next_expiry_; }
  Scheduler& scheduler() { return scheduler_; }
  const Scheduler& scheduler() const { return scheduler_; }
  const KvPages& pages() const { return pages_; }

 private:
  using Requests = std::map<uint64_t, std::unique_ptr<Request>>;  // by ticket: oldest first

  void EndSequence(Sequence& sequence, SampleEnd end);
  // Ends what is left of the request with kAbort, then closes it with OK.
  Requests::iterator Abort(Requests::iterator request, const std::string& reason);
  // Forgets the request, frees what is left of it and emits OnDone.
  Requests::iterator Close(Requests::iterator request, const absl::Status& status);

  const QueueLimits limits_;
  const std::shared_ptr<const WeightVersion>& version_;
  std::vector<Emission>& outbox_;
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
