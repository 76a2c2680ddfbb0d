// Continuous batching with whole-prompt prefills and preemption by recompute. See scheduler.h.
#include "rollout/schedule/scheduler.h"

#include <algorithm>
#include <array>
#include <utility>

#include "common/base/check.h"

namespace isobit {
namespace {

// Tokens and candidates, pending ones included.
int64_t NumTokens(const Sequence& sequence) {
  return static_cast<int64_t>(sequence.tokens.size() + sequence.candidates.size()) +
         sequence.num_pending;
}

// The most tokens that the sequence can ever have.
int64_t MaxTokens(const Sequence& sequence) {
  const Request& request = *sequence.request;
  return int64_t{request.num_prompt_tokens} + request.max_tokens;
}

// Whether the sequence has its prompt and nothing more.
bool IsFresh(const Sequence& sequence) {
  return sequence.tokens.size() == sequence.request->num_prompt_tokens && sequence.num_pending == 0;
}

}  // namespace

Scheduler::Readiness Scheduler::ReadinessOf(const Sequence& sequence) const {
  if (sequence.is_verified && sequence.guesses.empty()) {
    const size_t candidates = sequence.candidates.size() + sequence.num_pending_candidates;
    const bool is_full = sequence.is_window_closed || candidates + 1 >= limits_.fast_path.window ||
                         (candidates > 0 && NumTokens(sequence) >= MaxTokens(sequence));
    if (is_full) return sequence.num_pending == 0 ? Readiness::kVerify : Readiness::kWaits;
  }
  if (sequence.num_pending == 0) return Readiness::kReady;
  if (NumTokens(sequence) >= MaxTokens(sequence)) return Readiness::kEnding;
  if (sequence.sampling->needs_counts()) return Readiness::kWaits;
  const bool guess =
      !sequence.guesses.empty() || (sequence.draft != nullptr && sequence.draft->is_expected);
  return guess ? Readiness::kGuess : Readiness::kFed;
}

bool Scheduler::CanRun(const Sequence& sequence) const {
  const Readiness readiness = ReadinessOf(sequence);
  return readiness == Readiness::kReady || readiness == Readiness::kFed;
}

Scheduler::Scheduler(const SchedulerLimits& limits, KvPages& pages, Speculation* speculation)
    : limits_(limits), pages_(pages), speculation_(speculation) {
  ISOBIT_CHECK(limits.max_running > 0 &&
               limits.max_batch_tokens >= static_cast<int64_t>(limits.max_running) &&
               limits.fast_path.window <= limits.max_running)
      << limits.max_running << " sequences, " << limits.max_batch_tokens << " tokens, windows of "
      << limits.fast_path.window;
}

void Scheduler::Add(Sequence& sequence) {
  sequence.arrival = next_arrival_++;
  sequence.state = Sequence::State::kWaiting;
  sequence.is_verified = limits_.fast_path.is_on() && sequence.request->deterministic;
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
  FindExpectedGuesses();
  if (ShouldWait()) return step;
  pages_.BeginStep();
  step.sequences.reserve(limits_.max_running);
  StepRoom room = {.draws = static_cast<int64_t>(limits_.max_running),
                   .tokens = limits_.max_batch_tokens};
  const std::vector<Sequence*> full = FullWindows();
  const bool verifies = ShouldVerify(full.size());
  // Every sequence that goes on gets a page for its next token; the latest ones are preempted for
  // it.
  if (verifies) AddWindows(full, /*may_preempt=*/true, room, step);
  const std::vector<Sequence*> windows = step.sequences;
  for (size_t i = 0; i < running_.size() && room.draws > 0; ++i) {
    if (!CanRun(*running_[i]) || std::ranges::find(windows, running_[i]) != windows.end()) continue;
    if (!GrowOrPreempt(*running_[i], step)) break;
    step.sequences.push_back(running_[i]);
    --room.draws;
    --room.tokens;
  }
  num_kept_pages_ = 0;
  const size_t num_going_on = step.sequences.size();
  while (running_.size() < limits_.max_running && room.draws > 0 && HeadMayStart()) {
    const Sequence& head = *waiting_.front();
    const int64_t computed = StartHead(room.tokens, step);
    if (computed == 0) break;
    --room.draws;
    room.tokens -= computed;
    if (limits_.share_prefixes && IsFresh(head)) StartSiblings(head, room, step);
  }
  const bool starts = step.sequences.size() > num_going_on;
  if (starts && !verifies) AddWindows(full, /*may_preempt=*/false, room, step);
  step.fast = limits_.fast_path.is_on() && !starts && !verifies;
  if (step.fast && !step.sequences.empty()) ++counts_.steps;
  AddGuesses(num_going_on, room, step);
  return step;
}

std::vector<Sequence*> Scheduler::FullWindows() const {
  std::vector<Sequence*> full;
  if (!limits_.fast_path.is_on()) return full;
  for (Sequence* sequence : running_) {
    if (full.size() == limits_.fast_path.group) break;
    if (ReadinessOf(*sequence) == Readiness::kVerify) full.push_back(sequence);
  }
  return full;
}

bool Scheduler::ShouldVerify(size_t num_full) const {
  if (num_full == 0 || num_full == limits_.fast_path.group) return num_full > 0;
  return std::none_of(running_.begin(), running_.end(), [this](const Sequence* sequence) {
    return sequence->is_verified && ReadinessOf(*sequence) != Readiness::kVerify;
  });
}

void Scheduler::AddWindows(const std::vector<Sequence*>& full, bool may_preempt, StepRoom& room,
                           ScheduledStep& step) {
  for (Sequence* sequence : full) {
    // It may have been preempted meanwhile.
    if (sequence->state != Sequence::State::kRunning ||
        ReadinessOf(*sequence) != Readiness::kVerify) {
      continue;
    }
    const auto rows = static_cast<int64_t>(sequence->candidates.size()) + 1;
    if (rows > room.draws || rows > room.tokens) return;
    if (!(may_preempt ? GrowOrPreempt(*sequence, step) : Grow(*sequence, step))) return;
    sequence->guesses = std::exchange(sequence->candidates, {});
    sequence->is_window_closed = false;
    step.sequences.push_back(sequence);
    room.draws -= rows;
    room.tokens -= rows;
  }
}

void Scheduler::DropWindow(std::vector<int32_t>& candidates) {
  counts_.recomputed += static_cast<int64_t>(candidates.size());
  candidates.clear();
}

void Scheduler::SettleWindow(size_t candidates, size_t accepted) {
  ++counts_.windows;
  counts_.rollbacks += accepted < candidates ? 1 : 0;
  counts_.verified += static_cast<int64_t>(accepted);
  counts_.recomputed += static_cast<int64_t>(candidates - accepted);
}

void Scheduler::FindExpectedGuesses() {
  if (speculation_ == nullptr || speculation_->num_drafters() == 0) return;
  const size_t most = FreePagesForGuesses() > 0 ? limits_.max_running : 0;
  // Of the step after the one in flight. Those with guesses in flight will have as many again.
  size_t room = most - std::min(running_.size(), most);
  for (const Sequence* sequence : running_) {
    if (sequence->num_pending > 0) room -= std::min(sequence->guesses.size(), room);
  }
  std::vector<Sequence*> expected;
  for (Sequence* sequence : running_) {
    if (sequence->draft != nullptr && sequence->num_pending > 0) {
      sequence->draft->is_expected = false;
    }
    if (ReadinessOf(*sequence) != Readiness::kFed) continue;
    speculation_->Expect(*sequence, running_.size(), room);
    if (ReadinessOf(*sequence) == Readiness::kGuess) expected.push_back(sequence);
  }
  speculation_->Weigh(expected, running_.size(), /*sit_out=*/!ShouldWait(), room);
}

int64_t Scheduler::FreePagesForGuesses() const {
  return std::max<int64_t>(pages_.num_free() - static_cast<int64_t>(running_.size()), 0);
}

void Scheduler::AddGuesses(size_t num_going_on, const StepRoom& left, const ScheduledStep& step) {
  if (speculation_ == nullptr || speculation_->num_drafters() == 0) return;
  int64_t room = std::min(left.draws, left.tokens);
  std::vector<Sequence*> drafted;
  for (size_t i = 0; i < num_going_on && room > 0; ++i) {
    Sequence& sequence = *step.sequences[i];
    if (sequence.num_pending > 0) continue;
    const int64_t tokens = NumTokens(sequence);
    const int64_t pages = static_cast<int64_t>(sequence.pages.size()) + FreePagesForGuesses();
    const int64_t most =
        std::min({room, MaxTokens(sequence) - tokens - 1, pages * pages_.page_size() - tokens});
    if (most <= 0) continue;
    speculation_->Draft(sequence, running_.size(), static_cast<size_t>(most));
    const auto guesses = static_cast<int64_t>(sequence.guesses.size());
    if (guesses == 0) continue;
    pages_.Grow(sequence.pages, tokens + guesses, MaxTokens(sequence));
    room -= guesses;
    drafted.push_back(&sequence);
  }
  // While this step is in flight, the sequences of the one that is in flight now may go on.
  const bool sit_out = std::ranges::any_of(running_, [this](const Sequence* sequence) {
    return sequence->num_pending > 0 && ReadinessOf(*sequence) != Readiness::kEnding;
  });
  speculation_->Weigh(drafted, num_going_on, sit_out, limits_.max_running);
  for (Sequence* sequence : drafted) {
    if (sequence->guesses.empty()) DropGuesses(*sequence);
  }
}

void Scheduler::DropGuesses(Sequence& sequence) {
  pages_.Trim(sequence.pages, NumTokens(sequence));
}

int64_t Scheduler::StartHead(int64_t max_tokens, ScheduledStep& step) {
  Sequence& head = *waiting_.front();
  if (head.num_pending > 0) return 0;  // preempted just now, and a step in flight still has it
  const int64_t free_pages = pages_.num_free() - num_kept_pages_;
  if (head.arrival == blocked_arrival_ && free_pages <= blocked_pages_) return 0;
  const int64_t tokens = NumTokens(head);
  const absl::Span<const int32_t> known(head.tokens);
  std::vector<int32_t> found;
  // The last token's row is computed in any case, since it draws the next token.
  if (limits_.share_prefixes) found = pages_.Find(known.first(known.size() - 1));
  const int64_t cached = static_cast<int64_t>(found.size()) * pages_.page_size();
  if (tokens - cached > max_tokens) return 0;
  if (!pages_.Begin(head.pages, found, tokens, MaxTokens(head), num_kept_pages_)) {
    blocked_arrival_ = head.arrival;
    blocked_pages_ = free_pages;
    return 0;
  }
  step.writes_past |= !found.empty() && pages_.IsNew(found.back());
  if (limits_.share_prefixes) pages_.Publish(head.pages, known);
  head.num_cached = cached;
  TakeHead(step);
  return tokens - cached;
}

void Scheduler::StartSiblings(const Sequence& first, StepRoom& room, ScheduledStep& step) {
  while (running_.size() < limits_.max_running && room.draws > 0 && HeadMayStart()) {
    Sequence& head = *waiting_.front();
    if (head.request != first.request || !IsFresh(head)) return;
    if (num_kept_pages_ == pages_.num_free()) return;
    ++num_kept_pages_;
    pages_.Share(first.pages, NumTokens(head), MaxTokens(head), head.pages);
    head.num_cached = NumTokens(head);
    TakeHead(step);
    --room.draws;
  }
}

void Scheduler::TakeHead(ScheduledStep& step) {
  Sequence& head = *waiting_.front();
  waiting_.pop_front();
  CountWaiting(head, -1);
  head.state = Sequence::State::kRunning;
  head.num_exact = NumTokens(head);
  running_.push_back(&head);
  step.sequences.push_back(&head);
  if (head.sampling != nullptr) return;  // it has started before
  head.num_cached_prompt_tokens = static_cast<uint32_t>(head.num_cached);
  prompt_counts_.all += head.request->num_prompt_tokens;
  prompt_counts_.cached += head.num_cached_prompt_tokens;
}

bool Scheduler::ShouldWait() const {
  std::array<size_t, static_cast<size_t>(Readiness::kCount)> count{};
  for (const Sequence* sequence : running_) {
    ++count[static_cast<size_t>(ReadinessOf(*sequence))];
  }
  const auto number = [&count](Readiness readiness) {
    return count[static_cast<size_t>(readiness)];
  };
  const size_t fed = number(Readiness::kFed);
  const size_t guess = number(Readiness::kGuess);
  if (fed == 0) return guess + number(Readiness::kWaits) > 0;
  return guess > 0 && 2 * guess >= fed;
}

bool Scheduler::Grow(Sequence& sequence, ScheduledStep& step) {
  return pages_.OwnLastPage(sequence.pages, step.copies) &&
         pages_.Grow(sequence.pages, NumTokens(sequence), MaxTokens(sequence));
}

bool Scheduler::GrowOrPreempt(Sequence& sequence, ScheduledStep& step) {
  while (!Grow(sequence, step)) {
    Sequence& latest = *running_.back();
    ++latest.num_preemptions;
    if (std::erase(step.sequences, &latest) > 0) DropWindow(latest.guesses);
    Preempt();
    if (&latest == &sequence) return false;
  }
  return true;
}

// Tokens that steps in flight draw are not known yet, so pages that they fill cannot be cached.
// INVARIANT: what the fast path has computed is never cached (FastPathTest.*).
void Scheduler::FreePages(Sequence& sequence) {
  const absl::Span<const int32_t> tokens(sequence.tokens);
  const bool is_exact = sequence.is_verified || !limits_.fast_path.is_on();
  const auto computed = static_cast<size_t>(
      is_exact ? sequence.num_cached : std::min(sequence.num_cached, sequence.num_exact));
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
  DropWindow(sequence.candidates);
  sequence.is_window_closed = false;
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
