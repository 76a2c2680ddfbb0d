// Who takes part in the next step: which running sequences go on, who is preempted when pages run
// out, and who waits in the queue.
#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "rollout/schedule/readiness.h"
#include "rollout/schedule/scheduler.h"

namespace isobit {

Scheduler::Scheduler(const SchedulerLimits& limits, StatePool& pages, Guesser* guesser)
    : limits_(limits),
      pages_(pages),
      guesser_(guesser),
      may_be_provisional_(guesser != nullptr && guesser->info().verify_window > 0) {
  ISOBIT_CHECK(limits.max_running > 0 &&
               limits.max_batch_tokens >= static_cast<int64_t>(limits.max_running))
      << limits.max_running << " sequences, " << limits.max_batch_tokens << " tokens";
}

void Scheduler::Add(Sequence& sequence) {
  sequence.arrival = next_arrival_++;
  sequence.phase = Sequence::Phase::kWaiting;
  waiting_.push_back(&sequence);
  CountWaiting(sequence, 1);
}

void Scheduler::Remove(Sequence& sequence) {
  if (sequence.phase == Sequence::Phase::kWaiting) {
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &sequence));
    CountWaiting(sequence, -1);
  } else if (sequence.phase == Sequence::Phase::kRunning) {
    running_.erase(std::find(running_.begin(), running_.end(), &sequence));
  }
  FreeState(sequence);
  sequence.phase = Sequence::Phase::kFinished;
}

ScheduledStep Scheduler::Schedule() {
  int64_t num_preemptions = 0;
  ScheduledStep step;
  do {
    num_preemptions = num_preemptions_;
    step = ChooseStep();
    // If the only sequences that could go on were preempted, the guesser may now let others go on.
  } while (step.sequences.empty() && num_preemptions_ > num_preemptions);
  ExtendAll(step);
  return step;
}

ScheduledStep Scheduler::ChooseStep() {
  ScheduledStep step;
  StepRoom room = {.draws = static_cast<int64_t>(limits_.max_running),
                   .tokens = limits_.max_batch_tokens};
  std::vector<Sequence*> first;
  if (guesser_ != nullptr) {
    first = guesser_->Plan(
        running_,
        {.rows = room.draws, .pages = FreePagesForGuesses(), .page_size = pages_.page_size()});
  }
  if (ShouldWait(running_)) return step;
  pages_.BeginStep();
  step.sequences.reserve(limits_.max_running);
  GoOn(first, room, step);
  const size_t num_going_on = step.sequences.size();
  StartNewcomers(room, step);
  if (guesser_ != nullptr) AddGuesses(num_going_on, room, step);
  return step;
}

void Scheduler::ExtendAll(ScheduledStep& step) {
  for (Sequence* sequence : step.sequences) {
    SlotsOfStep& slots = step.slots.emplace_back();
    if (DrawsCandidate(*sequence, step.provisional)) {
      slots = pages_.ExtendByCandidate(sequence->state, !HasCandidates(*sequence));
    } else if (const int64_t rows = NumRows(*sequence); rows > 0) {
      const int64_t end = sequence->num_cached + rows;
      const auto guesses = static_cast<int64_t>(sequence->guesses.size());
      slots = pages_.Extend(sequence->state, end, end + guesses);
    }
  }
}

void Scheduler::GoOn(const std::vector<Sequence*>& first, StepRoom& room, ScheduledStep& step) {
  const auto add = [&](Sequence* sequence) {
    const auto guesses = static_cast<int64_t>(sequence->guesses.size());
    const int64_t rows = NumRows(*sequence) + guesses;
    if (rows > room.tokens || !GrowOrPreempt(*sequence, step)) return false;
    step.sequences.push_back(sequence);
    room.draws -= guesses + 1;
    room.tokens -= rows;
    return true;
  };
  for (Sequence* sequence : first) {
    // It may have been preempted meanwhile.
    if (sequence->phase == Sequence::Phase::kRunning && !add(sequence)) break;
  }
  for (size_t i = 0; i < running_.size() && room.draws > 0; ++i) {
    const Readiness readiness = ReadinessOf(*running_[i]);
    if (readiness != Readiness::kReady && readiness != Readiness::kFed) continue;
    if (!add(running_[i])) break;
  }
}

void Scheduler::AddGuesses(size_t num_going_on, const StepRoom& room, ScheduledStep& step) {
  const GuessRoom left = {.rows = std::min(room.draws, room.tokens),
                          .pages = FreePagesForGuesses(),
                          .page_size = pages_.page_size()};
  for (Sequence* sequence : guesser_->Fill(running_, num_going_on, left, step)) {
    if (!Grow(*sequence, step)) {
      ISOBIT_CHECK(pages_.has_slots()) << "guesses for which there are no pages";
      sequence->guesses.clear();
      continue;
    }
    if (sequence->turn == Sequence::Turn::kHeld) step.sequences.push_back(sequence);
  }
}

int64_t Scheduler::FreePagesForGuesses() const {
  return std::max<int64_t>(pages_.num_free() - static_cast<int64_t>(running_.size()), 0);
}

void Scheduler::DropGuesses(Sequence& sequence) {
  sequence.num_cached = pages_.Return(sequence.state, sequence.num_cached, NumTokens(sequence));
}

bool Scheduler::Grow(Sequence& sequence, ScheduledStep& step) {
  const auto guesses = static_cast<int64_t>(sequence.guesses.size());
  const bool spare = guesses > 0 || (may_be_provisional_ && sequence.request->deterministic);
  return pages_.ReserveSlots(sequence.state, spare) &&
         pages_.OwnLastPage(sequence.state, step.copies) &&
         pages_.Grow(sequence.state, NumTokens(sequence) + guesses, MaxTokens(sequence));
}

bool Scheduler::GrowOrPreempt(Sequence& sequence, ScheduledStep& step) {
  while (!Grow(sequence, step)) {
    Sequence& latest = *running_.back();
    ++latest.num_preemptions;
    std::erase(step.sequences, &latest);
    Preempt();
    if (&latest == &sequence) return false;
  }
  return true;
}

// Tokens that steps in flight draw are not known yet, so pages that they fill cannot be cached.
void Scheduler::FreeState(Sequence& sequence) {
  const absl::Span<const int32_t> tokens(sequence.tokens);
  const auto computed = static_cast<size_t>(std::min(sequence.num_cached, sequence.num_exact));
  pages_.Free(sequence.state, limits_.share_prefixes
                                  ? tokens.first(std::min(computed, tokens.size()))
                                  : tokens.first(0));
  sequence.num_cached = 0;
}

void Scheduler::PreemptAll() {
  while (!running_.empty()) Preempt();
}

void Scheduler::Preempt() {
  ++num_preemptions_;
  Sequence& sequence = *running_.back();
  running_.pop_back();
  if (guesser_ != nullptr) guesser_->Drop(sequence.candidates.size());
  sequence.candidates.clear();
  sequence.candidates_end = false;
  if (sequence.num_pending == 0 && !sequence.guesses.empty()) {  // no step has them yet
    guesser_->Drop(std::exchange(sequence.guesses, {}).size());
    sequence.guesses_were_candidates = false;
  }
  sequence.turn = Sequence::Turn::kGoesOn;
  FreeState(sequence);
  sequence.phase = Sequence::Phase::kWaiting;
  waiting_.push_front(&sequence);
  CountWaiting(sequence, 1);
}

void Scheduler::HoldNewcomers() { hold_from_ = std::min(hold_from_, next_arrival_); }

void Scheduler::ReleaseNewcomers() { hold_from_ = UINT64_MAX; }

void Scheduler::CountWaiting(const Sequence& sequence, int sign) {
  size_t& waiting = sequence.request->num_waiting;
  if (sign > 0) {
    num_waiting_requests_ += waiting++ == 0 ? 1 : 0;
  } else {
    num_waiting_requests_ -= --waiting == 0 ? 1 : 0;
  }
  // Candidates are dropped when it is preempted, pending ones later.
  num_waiting_tokens_ += sign * (NumTokens(sequence) - sequence.num_pending_candidates);
}

}  // namespace isobit
