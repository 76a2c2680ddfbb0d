// Continuous batching: decides which sequences take part in each step, and gives them KV pages.
// Pure logic: no thread, no clock, no model. Three questions, a file each: who takes part in
// a step (batching.cc), with which pages a sequence starts (prefix_starts.cc), and which running
// sequences are ready for a step (readiness.cc). A guesser fills the room that is left (guesser.h).
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
// Guesses use what a step has left: draws, tokens and pages. No sequence is preempted for them,
// except for those that the guesser places first.
#ifndef ISOBIT_ROLLOUT_SCHEDULE_SCHEDULER_H_
#define ISOBIT_ROLLOUT_SCHEDULE_SCHEDULER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "rollout/schedule/guesser.h"
#include "rollout/schedule/request.h"
#include "rollout/schedule/state_pool.h"

namespace isobit {

struct SchedulerLimits {
  size_t max_running = 0;        // sequences and guesses in a step
  int64_t max_batch_tokens = 0;  // tokens in a step, guesses included
  bool share_prefixes = true;
};

// The sequences of a step. Each computes its tokens from num_cached on. A running sequence computes
// one token, which may be pending. A starting one computes all tokens that were not cached; none is
// pending. A sequence with nothing to compute draws from the last row of the one before it.
struct ScheduledStep {
  std::vector<Sequence*> sequences;
  std::vector<SlotsOfStep> slots;  // of each sequence
  std::vector<PageCopy> copies;    // to make before the step, in order
  // Whether a sequence starts with pages that the step writes for an earlier one.
  bool writes_past = false;
  // Whether other numerics than the contract's may compute it. What it draws for a deterministic
  // request is then a candidate, not a token.
  bool provisional = false;
};

// Prompt tokens of sequences that have started, each counted once, since the start.
struct PromptCounts {
  int64_t all = 0;
  int64_t cached = 0;  // found in the cache
};

// Not thread-safe. Owns no sequence: remove a sequence before it is destroyed.
class Scheduler {
 public:
  // Needs max_running > 0 and max_batch_tokens >= max_running. Each sequence must fit alone: all
  // its tokens, including future ones, fit into max_batch_tokens and into all pages. guesser:
  // outlives the scheduler; null: no guesses.
  Scheduler(const SchedulerLimits& limits, StatePool& pages, Guesser* guesser = nullptr);

  // Puts a new sequence at the end of the queue.
  void Add(Sequence& sequence);

  // Removes a sequence, running or queued, frees its pages and makes it kFinished. What it has
  // computed stays in the cache.
  void Remove(Sequence& sequence);

  // The next step. Its sequences have pages for all their tokens and guesses. It is empty if there
  // is no work, or if the work has to wait for a step in flight.
  ScheduledStep Schedule();

  // Returns a running sequence to the row behind its last right guess, or to an earlier one. All
  // its tokens are known.
  void DropGuesses(Sequence& sequence);

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
  int64_t num_preemptions() const { return num_preemptions_; }  // since the start

 private:
  // What there is still room for in a step.
  struct StepRoom {
    int64_t draws;
    int64_t tokens;  // that it computes
  };
  bool HeadMayStart() const { return !waiting_.empty() && waiting_.front()->arrival < hold_from_; }

  // batching.cc
  ScheduledStep ChooseStep();
  // Adds to the step what goes on: first the sequences that the guesser places first, then all
  // others that can. Each gets a page for its next token; the latest ones are preempted for it.
  void GoOn(const std::vector<Sequence*>& first, StepRoom& room, ScheduledStep& step);
  // Asks the guesser what to do with the room that is left. The first num_going_on sequences of the
  // step have run before.
  void AddGuesses(size_t num_going_on, const StepRoom& room, ScheduledStep& step);
  // The free pages, less one for each running sequence, which may need it for its next token.
  int64_t FreePagesForGuesses() const;
  // Gives a running sequence pages and slots for all its tokens and guesses.
  bool Grow(Sequence& sequence, ScheduledStep& step);
  // Likewise, but preempts the latest sequences until there are pages. False: the latest was this
  // one.
  bool GrowOrPreempt(Sequence& sequence, ScheduledStep& step);
  // Settles which slots the step's sequences read and write.
  void ExtendAll(ScheduledStep& step);
  void FreeState(Sequence& sequence);
  void Preempt();  // the latest running sequence
  void CountWaiting(const Sequence& sequence, int sign);

  // prefix_starts.cc
  // Starts sequences from the head of the queue, as far as there is room.
  void StartNewcomers(StepRoom& room, ScheduledStep& step);
  // Starts the head of the queue, with pages for all its tokens, if it fits and computes at most
  // max_tokens. Returns the number of tokens that it computes; 0: it does not fit.
  int64_t StartHead(int64_t max_tokens, ScheduledStep& step);
  // Starts samples behind `first`, which has just started, with its pages, as far as they fit. Each
  // will need a page for its first token; num_kept_pages_ counts these.
  void StartSiblings(const Sequence& first, StepRoom& room, ScheduledStep& step);
  void TakeHead(ScheduledStep& step);  // from the queue into the step

  const SchedulerLimits limits_;
  StatePool& pages_;
  Guesser* const guesser_;
  const bool may_be_provisional_;  // whether a step may be provisional
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
  int64_t num_preemptions_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULE_SCHEDULER_H_
