// With what state sequences start: that of a prefix which is cached or which another sample of the
// request has just started with, and new pages for the rest.
#include "rollout/schedule/readiness.h"
#include "rollout/schedule/scheduler.h"

namespace isobit {
namespace {

// Whether the sequence has its prompt and nothing more.
bool IsFresh(const Sequence& sequence) {
  return sequence.tokens.size() == sequence.request->num_prompt_tokens && sequence.num_pending == 0;
}

}  // namespace

void Scheduler::StartNewcomers(StepRoom& room, ScheduledStep& step) {
  num_kept_pages_ = 0;
  while (running_.size() < limits_.max_running && room.draws > 0 && HeadMayStart()) {
    const Sequence& head = *waiting_.front();
    const int64_t computed = StartHead(room.tokens, step);
    if (computed == 0) break;
    --room.draws;
    room.tokens -= computed;
    if (limits_.share_prefixes && IsFresh(head)) StartSiblings(head, room, step);
  }
}

int64_t Scheduler::StartHead(int64_t max_tokens, ScheduledStep& step) {
  Sequence& head = *waiting_.front();
  if (head.num_pending > 0) return 0;  // preempted just now, and a step in flight still has it
  const int64_t free_pages = pages_.num_free() - num_kept_pages_;
  if (head.arrival == blocked_arrival_ && free_pages <= blocked_pages_) return 0;
  const int64_t tokens = NumTokens(head);
  const absl::Span<const int32_t> known(head.tokens);
  StatePool::Prefix found;
  // The last token's row is computed in any case, since it draws the next token.
  if (limits_.share_prefixes) found = pages_.Find(known.first(known.size() - 1));
  const int64_t cached = static_cast<int64_t>(found.pages.size()) * pages_.page_size();
  if (tokens - cached > max_tokens) return 0;
  if (!pages_.Begin(head.state, found, tokens, MaxTokens(head), num_kept_pages_)) {
    // With slots, it may also be a slot that is missing.
    if (!pages_.has_slots()) blocked_arrival_ = head.arrival;
    blocked_pages_ = free_pages;
    return 0;
  }
  step.writes_past |= !found.pages.empty() && pages_.IsNew(found.pages.back());
  if (limits_.share_prefixes) pages_.Publish(head.state, known, cached, found.known_rows);
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
    pages_.Share(first.state, NumTokens(head), MaxTokens(head), head.state);
    head.num_cached = NumTokens(head);
    TakeHead(step);
    --room.draws;
  }
}

void Scheduler::TakeHead(ScheduledStep& step) {
  Sequence& head = *waiting_.front();
  waiting_.pop_front();
  CountWaiting(head, -1);
  head.phase = Sequence::Phase::kRunning;
  running_.push_back(&head);
  step.sequences.push_back(&head);
  if (head.sampling != nullptr) return;  // it has started before
  head.num_cached_prompt_tokens = static_cast<uint32_t>(head.num_cached);
  prompt_counts_.all += head.request->num_prompt_tokens;
  prompt_counts_.cached += head.num_cached_prompt_tokens;
}

}  // namespace isobit
