// Continuous batching: decides which sequences take part in each step, and gives them KV pages.
// Pure logic: no thread, no clock, no model.
//
// First come, first served: a sequence starts only when every earlier one has started, and when
// pages run out the latest sequence is preempted first. So the earliest sequence always progresses,
// and none starves.
//
// Prompts are computed once. A sequence begins with the cached pages of its tokens, and its step
// computes the rest whole: only that counts in the step's budget. The samples of a request that
// start in one step share all pages of the first of them, which alone has rows in that step: the
// others draw from its last row. Cached pages that nobody uses yield before anybody is preempted.
//
// A sequence may take part in the next step while a step in flight still draws its last token,
// unless it has penalties, which must count that token first, or guesses, of which the step in
// flight shows how many hold. If the token turns out to end the sequence, its row of the next step
// is computed for nothing.
//
// Guesses take what a step has left: draws, tokens and pages. Nobody is preempted for them.
//
// With a fast path a step is fast unless it starts a sequence or verifies windows. Windows are
// verified once as many are full as form a group, or all of those that may become full; and beside
// sequences that start, as far as there is room. Windows of a group come first; the others of the
// step take what draws are left.
#ifndef ISOBIT_ROLLOUT_SCHEDULER_H_
#define ISOBIT_ROLLOUT_SCHEDULER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "rollout/fast_path.h"
#include "rollout/kv_pages.h"
#include "rollout/request.h"
#include "rollout/speculation.h"

namespace isobit {

struct SchedulerLimits {
  size_t max_running = 0;        // sequences and guesses in a step
  int64_t max_batch_tokens = 0;  // tokens in a step, guesses included
  bool share_prefixes = true;
  FastPathOptions fast_path{};  // window <= max_running
};

// The sequences of a step. Each computes its tokens from num_cached on: a running sequence one
// token, which may be pending; one that starts all that were not cached, of which none is pending.
// One that has nothing to compute draws from the last row of the sequence before it.
struct ScheduledStep {
  std::vector<Sequence*> sequences;
  std::vector<PageCopy> copies;  // to be made before the step, in order
  // A sequence starts with pages that the step writes for one before it.
  bool writes_past = false;
  bool fast = false;  // the fast path may compute it
};

// Prompt tokens of sequences that have started, each once, since the start.
struct PromptCounts {
  int64_t all = 0;
  int64_t cached = 0;  // found computed
};

// Not thread-safe. Owns no sequence: remove a sequence before it is destroyed.
class Scheduler {
 public:
  // Needs max_running > 0, max_batch_tokens >= max_running and fast_path.window <= max_running.
  // Each sequence must fit alone: its tokens, including those still to come, are at most
  // max_batch_tokens and fit in all pages. speculation: outlives the object; null: no guesses.
  Scheduler(const SchedulerLimits& limits, KvPages& pages, Speculation* speculation = nullptr);

  // Puts a new sequence at the end of the queue.
  void Add(Sequence& sequence);

  // Takes a sequence out, wherever it is, frees its pages and makes it kFinished. What it has
  // computed stays in the cache.
  void Remove(Sequence& sequence);

  // The next step, whose sequences have pages for all their tokens and guesses. No sequence: there
  // is no work, or it waits for a step in flight.
  ScheduledStep Schedule();

  // Frees the pages of a running sequence's guesses that were wrong. Its tokens are known.
  void DropGuesses(Sequence& sequence);

  // Of so many candidates of a window that was verified, the first `accepted` have become tokens.
  void SettleWindow(size_t candidates, size_t accepted);
  // A candidate is dropped before it was verified.
  void CountDroppedCandidate() { ++counts_.recomputed; }

  // Sends every running sequence back to the head of the queue, in order, without its pages.
  void PreemptAll();

  // Sequences that are added from now on wait until ReleaseNewcomers; earlier ones go on.
  void HoldNewcomers();
  void ReleaseNewcomers();

  // Whether Schedule has something to do.
  bool HasWork() const { return !running_.empty() || HeadMayStart(); }

  size_t num_waiting_requests() const { return num_waiting_requests_; }
  int64_t num_waiting_tokens() const { return num_waiting_tokens_; }  // cached ones included
  const PromptCounts& prompt_counts() const { return prompt_counts_; }
  int64_t num_preemptions() const { return num_preemptions_; }        // since the start
  const FastPathCounts& fast_path_counts() const { return counts_; }  // any thread

 private:
  // What a step may still take.
  struct StepRoom {
    int64_t draws;
    int64_t tokens;  // that it computes
  };
  // Whether a running sequence can take part in the next step.
  enum class Readiness {
    kReady,   // its tokens are known
    kFed,     // the step in flight draws its last token, which stays on the device
    kWaits,   // its penalties must count its last token first, or its window is full but for it
    kGuess,   // it waits for its last token, because of guesses
    kEnding,  // it will not need another step
    kVerify,  // its window is full
    kCount
  };
  Readiness ReadinessOf(const Sequence& sequence) const;
  bool CanRun(const Sequence& sequence) const;
  bool HeadMayStart() const { return !waiting_.empty() && waiting_.front()->arrival < hold_from_; }
  // Whether the next step should wait for the step in flight. It should if no sequence can go on
  // before that step ends and one waits for it: otherwise two groups of sequences would alternate
  // from then on, each at half the speed.
  bool ShouldWait() const;
  // Sets which running sequences wait for their pending token, to be guessed for then.
  void FindExpectedGuesses();
  // Each running sequence may need a page for its next token before guesses give theirs back.
  int64_t FreePagesForGuesses() const;
  // Gives the first num_going_on sequences of the step guesses, as far as there is room.
  void AddGuesses(size_t num_going_on, const StepRoom& room, const ScheduledStep& step);
  // The oldest sequences whose windows are full, at most a group.
  std::vector<Sequence*> FullWindows() const;
  // Whether the next step should verify them, at the cost of not being fast.
  bool ShouldVerify(size_t num_full) const;
  // Adds those that fit to the step, and their windows to what it verifies.
  void AddWindows(const std::vector<Sequence*>& full, bool may_preempt, StepRoom& room,
                  ScheduledStep& step);
  void DropWindow(std::vector<int32_t>& candidates);
  // Gives a running sequence pages for all its tokens.
  bool Grow(Sequence& sequence, ScheduledStep& step);
  // Likewise, and preempts the latest ones until there are pages. False: the sequence was the
  // latest.
  bool GrowOrPreempt(Sequence& sequence, ScheduledStep& step);
  // The head of the queue starts, with pages for all its tokens, if it fits. Returns the tokens
  // that it computes; 0: it does not fit. max_tokens: that it may compute.
  int64_t StartHead(int64_t max_tokens, ScheduledStep& step);
  // The samples behind `first`, which has just started, start with its pages as far as they fit.
  // Each will need a page for its first token, which is kept for it.
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
  int64_t num_kept_pages_ = 0;  // for the next step
  // The head that did not fit for want of pages, and how many it could have taken. It tries again
  // when there are more, because the search for its cached pages takes time in every step.
  uint64_t blocked_arrival_ = UINT64_MAX;
  int64_t blocked_pages_ = 0;
  PromptCounts prompt_counts_;
  FastPathCounts counts_;
  int64_t num_preemptions_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULER_H_
