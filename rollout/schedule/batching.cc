// Who takes part in the next step: which running sequences go on, who is preempted when pages run
// out, and who waits in the queue.
#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "rollout/schedule/readiness.h"
#include "rollout/schedule/scheduler.h"

namespace isobit {

Scheduler::Scheduler(const SchedulerLimits& limits, KvPages& pages, Guesser* guesser)
    : limits_(limits), pages_(pages), guesser_(guesser) {
  ISOBIT_CHECK(limits.max_running > 0 &&
               limits.max_batch_tokens >= static_cast<int64_t>(limits.max_running))
      << limits.max_running << " sequences, " << limits.max_batch_tokens << " tokens";
}

void Scheduler::Add(Sequence& sequence) {
  sequence.arrival = next_arrival_++;
  sequence.state = Sequence::State::kWaiting;
  waiting_.push_back(&sequence);
  CountWaiting(sequence, 1);
}

void Scheduler::Remove(Sequence& sequence) {
  if (sequence.state == Sequence::State::kWaiting) {
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &sequence));
    CountWaiting(sequence, -1);
  } else if (sequence.state == Sequence::State::kRunning) {
    running_.erase(std::find(running_.begin(), running_.end(), &sequence));
  }
  FreePages(sequence);
  sequence.state = Sequence::State::kFinished;
}

ScheduledStep Scheduler::Schedule() {
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

void Scheduler::GoOn(const std::vector<Sequence*>& first, StepRoom& room, ScheduledStep& step) {
  const auto add = [&](Sequence* sequence) {
    if (!GrowOrPreempt(*sequence, step)) return false;
    step.sequences.push_back(sequence);
    const auto rows = static_cast<int64_t>(sequence->guesses.size()) + 1;
    room.draws -= rows;
    room.tokens -= rows;
    return true;
  };
  for (Sequence* sequence : first) {
    // It may have been preempted meanwhile.
    if (sequence->state == Sequence::State::kRunning && !add(sequence)) break;
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
    ISOBIT_CHECK(Grow(*sequence, step)) << "guesses for which there are no pages";
    if (sequence->turn == Sequence::Turn::kHeld) step.sequences.push_back(sequence);
  }
}

int64_t Scheduler::FreePagesForGuesses() const {
  return std::max<int64_t>(pages_.num_free() - static_cast<int64_t>(running_.size()), 0);
}

void Scheduler::DropGuesses(Sequence& sequence) {
  pages_.Trim(sequence.pages, NumTokens(sequence));
}

bool Scheduler::Grow(Sequence& sequence, ScheduledStep& step) {
  const auto guesses = static_cast<int64_t>(sequence.guesses.size());
  return pages_.OwnLastPage(sequence.pages, step.copies) &&
         pages_.Grow(sequence.pages, NumTokens(sequence) + guesses, MaxTokens(sequence));
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
void Scheduler::FreePages(Sequence& sequence) {
  const absl::Span<const int32_t> tokens(sequence.tokens);
  const auto computed = static_cast<size_t>(std::min(sequence.num_cached, sequence.num_exact));
  pages_.Free(sequence.pages, limits_.share_prefixes
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
  FreePages(sequence);
  sequence.state = Sequence::State::kWaiting;
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
