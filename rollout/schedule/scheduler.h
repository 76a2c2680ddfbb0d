// Continuous batching: decides which sequences take part in each step, and gives them KV pages.
// Pure logic: no thread, no clock, no model.
//
// First come, first served: a sequence starts only after every earlier one has started, and when
// pages run out, the latest sequence is preempted first. So the earliest sequence always
// progresses, and none starves.
//
// Shared prefixes are computed once. A sequence begins with the cached pages of its first tokens;
// its step computes the rest in one go, and only the rest counts in the step's budget. Samples of a
// request that start in one step share all pages of the first one. Only that one has rows in the
// step; the others draw from its last row. Unused cached pages go before a sequence is preempted.
//
// While a step in flight draws a sequence's last token, the sequence may already take part in the
// next step. Exceptions: penalties must count that token first; with guesses, the step in flight
// decides how many of them are right. If the token turns out to end the sequence, its row in the
// next step is wasted.
//
// Guesses use what a step has left: draws, tokens and pages. No sequence is preempted for them.
//
// With a fast path, a step is fast unless it starts a sequence or verifies windows. Windows are
// verified once a whole group is full, or once all that can become full are. A step that starts
// sequences also verifies full windows, as far as there is room. A group's windows are placed
// first; the other sequences of the step take the draws that are left.
#ifndef ISOBIT_ROLLOUT_SCHEDULE_SCHEDULER_H_
#define ISOBIT_ROLLOUT_SCHEDULE_SCHEDULER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "rollout/schedule/fast_path.h"
#include "rollout/schedule/kv_pages.h"
#include "rollout/schedule/request.h"
#include "rollout/schedule/speculation.h"

namespace isobit {

struct SchedulerLimits {
  size_t max_running = 0;        // sequences and guesses in a step
  int64_t max_batch_tokens = 0;  // tokens in a step, guesses included
  bool share_prefixes = true;
  FastPathOptions fast_path{};  // window <= max_running
};

// The sequences of a step. Each computes its tokens from num_cached on. A running sequence computes
// one token, which may be pending. A starting one computes all tokens that were not cached; none is
// pending. A sequence with nothing to compute draws from the last row of the one before it.
struct ScheduledStep {
  std::vector<Sequence*> sequences;
  std::vector<PageCopy> copies;  // to make before the step, in order
  // Whether a sequence starts with pages that the step writes for an earlier one.
  bool writes_past = false;
  bool fast = false;  // whether the fast path may compute it
};

// Prompt tokens of sequences that have started, each counted once, since the start.
struct PromptCounts {
  int64_t all = 0;
  int64_t cached = 0;  // found in the cache
};

// Not thread-safe. Owns no sequence: remove a sequence before it is destroyed.
class Scheduler {
 public:
  // Needs max_running > 0, max_batch_tokens >= max_running and fast_path.window <= max_running.
  // Each sequence must fit alone: all its tokens, including future ones, fit into max_batch_tokens
  // and into all pages. speculation: outlives the scheduler; null: no guesses.
  Scheduler(const SchedulerLimits& limits, KvPages& pages, Speculation* speculation = nullptr);

  // Puts a new sequence at the end of the queue.
  void Add(Sequence& sequence);

  // Removes a sequence, running or queued, frees its pages and makes it kFinished. What it has
  // computed stays in the cache.
  void Remove(Sequence& sequence);

  // The next step. Its sequences have pages for all their tokens and guesses. It is empty if there
  // is no work, or if the work has to wait for a step in flight.
  ScheduledStep Schedule();

  // Frees the pages of a running sequence's wrong guesses. All its tokens are known.
  void DropGuesses(Sequence& sequence);

  // Counts a verified window of `candidates`, of which the first `accepted` have become tokens.
  void SettleWindow(size_t candidates, size_t accepted);
  // Counts a candidate that is dropped without having been verified.
  void CountDroppedCandidate() { ++counts_.recomputed; }

  // Returns every running sequence, without its pages, to the head of the queue, in order.
  void PreemptAll();

  // Sequences that are added from now on wait until ReleaseNewcomers; earlier ones still start.
  void HoldNewcomers();
  void ReleaseNewcomers();

  // Whether there is work for Schedule.
  bool HasWork() const { return !running_.empty() || HeadMayStart(); }

  size_t num_waiting_requests() const { return num_waiting_requests_; }
  int64_t num_waiting_tokens() const { return num_waiting_tokens_; }  // including cached ones
  const PromptCounts& prompt_counts() const { return prompt_counts_; }
  int64_t num_preemptions() const { return num_preemptions_; }        // since the start
  const FastPathCounts& fast_path_counts() const { return counts_; }  // may be read by any thread

 private:
  // What there is still room for in a step.
  struct StepRoom {
    int64_t draws;
    int64_t tokens;  // that it computes
  };
  // Whether a running sequence can take part in the next step.
  enum class Readiness {
    kReady,   // its tokens are known
    kFed,     // the step in flight draws its last token, which stays on the device
    kWaits,   // penalties need its last token, or its window is full but for that token
    kGuess,   // its last token is in flight, and guesses will follow it
    kEnding,  // it needs no further step
    kVerify,  // its window is full: verify it
    kCount
  };
  Readiness ReadinessOf(const Sequence& sequence) const;
  bool CanRun(const Sequence& sequence) const;
  bool HeadMayStart() const { return !waiting_.empty() && waiting_.front()->arrival < hold_from_; }
  // Whether the next step should wait for the step in flight: if no sequence can go on before that
  // step ends, and a sequence waits for it. Otherwise two groups of sequences would alternate from
  // then on, each at half the speed.
  bool ShouldWait() const;
  // Decides which running sequences wait for their pending token, to get guesses behind it.
  void FindExpectedGuesses();
  // The free pages, less one for each running sequence, which may need it for its next token.
  int64_t FreePagesForGuesses() const;
  // Gives guesses to the first num_going_on sequences of the step, as far as there is room.
  void AddGuesses(size_t num_going_on, const StepRoom& room, const ScheduledStep& step);
  // The oldest sequences whose windows are full, at most a group.
  std::vector<Sequence*> FullWindows() const;
  // Whether the next step should verify full windows although it is then not fast.
  bool ShouldVerify(size_t num_full) const;
  // Adds those of the windows that fit to the step, to be verified.
  void AddWindows(const std::vector<Sequence*>& full, bool may_preempt, StepRoom& room,
                  ScheduledStep& step);
  void DropWindow(std::vector<int32_t>& candidates);
  // Gives a running sequence pages for all its tokens.
  bool Grow(Sequence& sequence, ScheduledStep& step);
  // Likewise, but preempts the latest sequences until there are pages. False: the latest was this
  // one.
  bool GrowOrPreempt(Sequence& sequence, ScheduledStep& step);
  // Starts the head of the queue, with pages for all its tokens, if it fits and computes at most
  // max_tokens. Returns the number of tokens that it computes; 0: it does not fit.
  int64_t StartHead(int64_t max_tokens, ScheduledStep& step);
  // Starts samples behind `first`, which has just started, with its pages, as far as they fit. Each
  // will need a page for its first token; num_kept_pages_ counts these.
  void StartSiblings(const Sequence& first, StepRoom& room, ScheduledStep& step);
  void TakeHead(ScheduledStep& step);  // from the queue into the step
  void FreePages(Sequence& sequence);
  void Preempt();  // the latest running sequence
  void CountWaiting(const Sequence& sequence, int sign);

  const SchedulerLimits limits_;
  KvPages& pages_;
  Speculation* const speculation_;
  // INVARIANT: arrivals ascend through running_, then waiting_ (SchedulerTest.*).
  std::vector<Sequence*> running_;
  std::deque<Sequence*> waiting_;
  uint64_t next_arrival_ = 0;
  uint64_t hold_from_ = UINT64_MAX;
  size_t num_waiting_requests_ = 0;
  int64_t num_waiting_tokens_ = 0;
  int64_t num_kept_pages_ = 0;  // reserved for the next step
  // The head that did not fit, and the free pages it had then. It is tried again only when there
  // are more free pages, because searching for its cached pages takes time.
  uint64_t blocked_arrival_ = UINT64_MAX;
  int64_t blocked_pages_ = 0;
  PromptCounts prompt_counts_;
  FastPathCounts counts_;
  int64_t num_preemptions_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULE_SCHEDULER_H_
