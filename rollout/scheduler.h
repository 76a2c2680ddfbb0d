// Continuous batching: decides which sequences take part in each step, and gives them KV pages.
// Pure logic: no thread, no clock, no model.
//
// First come, first served: a sequence starts only when every earlier one has started, and when
// pages run out the latest sequence is preempted first. So the earliest sequence always progresses,
// and none starves.
//
// A sequence may take part in the next step while a step in flight still draws its last token,
// unless it has penalties, which must count that token first. If the token turns out to end the
// sequence, its row of the next step is computed for nothing.
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

// Not thread-safe. Owns no sequence: remove a sequence before it is destroyed.
class Scheduler {
 public:
  // Needs max_running > 0 and max_batch_tokens >= max_running. Each sequence must fit alone: its
  // tokens, including those still to come, are at most max_batch_tokens and fit in all pages.
  Scheduler(const SchedulerLimits& limits, KvPages& pages);

  // Puts a new sequence at the end of the queue.
  void Add(Sequence& sequence);

  // Takes a sequence out, wherever it is, frees its pages and makes it kFinished.
  void Remove(Sequence& sequence);

  // The sequences of the next step, with pages for all their tokens. Each computes its tokens from
  // num_cached on: a running sequence one token, which may be pending; a newly admitted one all its
  // tokens, of which none is pending. Empty: there is no work, or it waits for a step in flight.
  std::vector<Sequence*> Schedule();

  // Sends every running sequence back to the head of the queue, in order, without its pages.
  void PreemptAll();

  // Sequences that are added from now on wait until ReleaseNewcomers; earlier ones go on.
  void HoldNewcomers();
  void ReleaseNewcomers();

  // Whether Schedule has something to do.
  bool HasWork() const { return !running_.empty() || HeadMayStart(); }

  size_t num_waiting_requests() const { return num_waiting_requests_; }
  int64_t num_waiting_tokens() const { return num_waiting_tokens_; }  // that prefills will compute

 private:
  bool HeadMayStart() const { return !waiting_.empty() && waiting_.front()->arrival < hold_from_; }
  // Whether the next step should wait for the step in flight. It should if no sequence can go on
  // before that step ends and one waits for it: otherwise two groups of sequences would alternate
  // from then on, each at half the speed.
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
