// Continuous batching with whole-prompt prefills and preemption by recompute. See scheduler.h.
#include "rollout/scheduler.h"

#include <algorithm>

#include "common/base/check.h"

namespace isobit {
namespace {

int64_t NumTokens(const Sequence& sequence) {
  return static_cast<int64_t>(sequence.tokens.size()) + sequence.num_pending;
}

// The most tokens that the sequence can ever have.
int64_t MaxTokens(const Sequence& sequence) {
  const Request& request = *sequence.request;
  return int64_t{request.num_prompt_tokens} + request.max_tokens;
}

// Whether a running sequence can take part in the next step.
enum class Readiness {
  kReady,   // its tokens are known
  kFed,     // the step in flight draws its last token, which stays on the device
  kWaits,   // its penalties must count its last token first
  kEnding,  // it will not need another step
};

Readiness ReadinessOf(const Sequence& sequence) {
  if (sequence.num_pending == 0) return Readiness::kReady;
  if (NumTokens(sequence) >= MaxTokens(sequence)) return Readiness::kEnding;
  return sequence.sampling->needs_counts() ? Readiness::kWaits : Readiness::kFed;
}

bool CanRun(const Sequence& sequence) {
  const Readiness readiness = ReadinessOf(sequence);
  return readiness == Readiness::kReady || readiness == Readiness::kFed;
}

}  // namespace

Scheduler::Scheduler(const SchedulerLimits& limits, KvPages& pages)
    : limits_(limits), pages_(pages) {
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
  pages_.Free(sequence.pages);
  sequence.num_cached = 0;
  sequence.state = Sequence::State::kFinished;
}

std::vector<Sequence*> Scheduler::Schedule() {
  if (ShouldWait()) return {};
  // Every running sequence gets a page for its next token; the latest ones are preempted for it.
  std::vector<Sequence*> batch;
  batch.reserve(limits_.max_running);
  for (size_t i = 0; i < running_.size(); ++i) {
    if (!CanRun(*running_[i])) continue;
    while (i < running_.size() && !Grow(*running_[i])) {
      ++running_.back()->num_preemptions;
      Preempt();
    }
    if (i < running_.size()) batch.push_back(running_[i]);
  }
  int64_t tokens = static_cast<int64_t>(batch.size());
  while (running_.size() < limits_.max_running && HeadMayStart()) {
    Sequence& head = *waiting_.front();
    if (head.num_pending > 0) break;  // preempted just now, and a step in flight still has it
    if (tokens + NumTokens(head) > limits_.max_batch_tokens || !Grow(head)) break;
    tokens += NumTokens(head);
    waiting_.pop_front();
    CountWaiting(head, -1);
    head.state = Sequence::State::kRunning;
    running_.push_back(&head);
    batch.push_back(&head);
  }
  return batch;
}

bool Scheduler::ShouldWait() const {
  bool waits = false;
  for (const Sequence* sequence : running_) {
    const Readiness readiness = ReadinessOf(*sequence);
    if (readiness == Readiness::kFed) return false;
    waits |= readiness == Readiness::kWaits;
  }
  return waits;
}

bool Scheduler::Grow(Sequence& sequence) {
  return pages_.Grow(sequence.pages, NumTokens(sequence), MaxTokens(sequence));
}

void Scheduler::PreemptAll() {
  while (!running_.empty()) Preempt();
}

void Scheduler::Preempt() {
  Sequence& sequence = *running_.back();
  running_.pop_back();
  pages_.Free(sequence.pages);
  sequence.num_cached = 0;
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
  num_waiting_tokens_ += sign * NumTokens(sequence);
}

}  // namespace isobit
