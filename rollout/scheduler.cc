// Continuous batching with whole-prompt prefills and preemption by recompute. See scheduler.h.
#include "rollout/scheduler.h"

#include <algorithm>

#include "common/base/check.h"

namespace isobit {
namespace {

int64_t NumTokens(const Sequence& sequence) { return static_cast<int64_t>(sequence.tokens.size()); }

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
  // Every running sequence gets a page for its next token, at the expense of the latest ones.
  for (size_t i = 0; i < running_.size(); ++i) {
    while (i < running_.size() && !pages_.Grow(running_[i]->pages, NumTokens(*running_[i]))) {
      ++running_.back()->num_preemptions;
      Preempt();
    }
  }
  int64_t tokens = static_cast<int64_t>(running_.size());
  while (running_.size() < limits_.max_running && HeadMayStart()) {
    Sequence& head = *waiting_.front();
    if (tokens + NumTokens(head) > limits_.max_batch_tokens) break;
    if (!pages_.Grow(head.pages, NumTokens(head))) break;
    tokens += NumTokens(head);
    waiting_.pop_front();
    CountWaiting(head, -1);
    head.state = Sequence::State::kRunning;
    running_.push_back(&head);
  }
  return running_;
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
