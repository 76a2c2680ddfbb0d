// Decides which sequences take part in each step, and moves their KV pages. Pure logic: no thread,
// no clock, no model.
//
// First come, first served: a sequence starts only when every earlier one has started, and when
// pages run out the latest one is the first to give way. So the earliest sequence always
// progresses, and nothing starves.
//
// A sequence may run again while its last token is still to come from a step in flight: what it
// needs is known, unless it has penalties, which count tokens. Whether that token stops it, shows
// only later: the row is then computed for nothing.
#ifndef ISOBIT_ROLLOUT_SCHEDULER_H_
#define ISOBIT_ROLLOUT_SCHEDULER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "rollout/kv_pages.h"
#include "rollout/request.h"

namespace isobit {

struct SchedulerLimits {
  size_t max_running = 0;        // sequences in a step
  int64_t max_batch_tokens = 0;  // tokens in a step
};

// Not thread-safe. Owns no sequence: one must be removed before it dies.
class Scheduler {
 public:
  // Needs max_running > 0, max_batch_tokens >= max_running, and sequences that each fit alone:
  // tokens + those still to come at most max_batch_tokens, and in all pages.
  Scheduler(const SchedulerLimits& limits, KvPages& pages);

  // Puts a new sequence at the end of the queue.
  void Add(Sequence& sequence);

  // Takes a sequence out, wherever it is, frees its pages and makes it kFinished.
  void Remove(Sequence& sequence);

  // The sequences of the next step, with pages for all their tokens. Each computes its tokens from
  // num_cached on: one token, which may be pending, or, just admitted, all of them, none of which
  // is. Empty only if there is no work, or if what there is waits for a step in flight.
  std::vector<Sequence*> Schedule();

  // Sends every running sequence back to the head of the queue, in order, without its pages.
  void PreemptAll();

  // From now on, what is added waits until ReleaseNewcomers; what came before goes on.
  void HoldNewcomers();
  void ReleaseNewcomers();

  // Whether Schedule has something to do.
  bool HasWork() const { return !running_.empty() || HeadMayStart(); }

  size_t num_waiting_requests() const { return num_waiting_requests_; }
  int64_t num_waiting_tokens() const { return num_waiting_tokens_; }  // that prefills will compute

 private:
  bool HeadMayStart() const { return !waiting_.empty() && waiting_.front()->arrival < hold_from_; }
  // Whether the next step should wait for the one in flight, since that one feeds nobody while
  // somebody waits for it: apart, the two would take turns from then on, each at half the speed.
  bool ShouldWait() const;
  bool Grow(Sequence& sequence);  // gives it pages for all its tokens
  void Preempt();                 // the latest running sequence
  void CountWaiting(const Sequence& sequence, int sign);

  const SchedulerLimits limits_;
  KvPages& pages_;
  // INVARIANT: arrivals ascend through running_, then waiting_ (SchedulerTest.*).
  std::vector<Sequence*> running_;
  std::deque<Sequence*> waiting_;
  uint64_t next_arrival_ = 0;
  uint64_t hold_from_ = UINT64_MAX;
  size_t num_waiting_requests_ = 0;
  int64_t num_waiting_tokens_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULER_H_
