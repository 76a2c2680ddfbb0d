// Decides which steps are fast and which windows are verified.
#include "rollout/guesses/fast_path/fast_path.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "rollout/schedule/readiness.h"
#include "rollout/schedule/scheduler.h"

namespace isobit {
namespace {

constexpr size_t kDefaultGroup = 32;  // windows that are verified together

}  // namespace

MakeGuesser FastPath::Maker(const FastPathOptions& options) {
  return [options](size_t max_running) -> absl::StatusOr<std::unique_ptr<Guesser>> {
    FastPathOptions fitted = options;
    if (fitted.group == 0) {
      fitted.group = std::clamp<size_t>(max_running / fitted.window, 1, kDefaultGroup);
    }
    const size_t rows = fitted.window * fitted.group;
    if (rows <= max_running) return std::make_unique<FastPath>(fitted);
    return absl::InvalidArgumentError(absl::StrCat(
        "--verify_window x --verify_group is ", fitted.window, " x ", fitted.group, " = ", rows,
        " rows of a step, expected at most --max_running (", max_running, ")"));
  };
}

bool FastPath::IsFull(const Sequence& sequence) const {
  if (!sequence.request->deterministic || !sequence.guesses.empty()) return false;
  const size_t candidates = sequence.candidates.size() + sequence.num_pending_candidates;
  return sequence.candidates_end || candidates + 1 >= options_.window ||
         (candidates > 0 && NumTokens(sequence) >= MaxTokens(sequence));
}

std::vector<Sequence*> FastPath::Plan(absl::Span<Sequence* const> running, const GuessRoom& room) {
  full_.clear();
  bool others_may_fill = false;
  for (Sequence* sequence : running) {
    sequence->turn = IsFull(*sequence) ? Sequence::Turn::kHeld : Sequence::Turn::kGoesOn;
    if (ReadinessOf(*sequence) == Readiness::kHeld) {
      full_.push_back(sequence);
    } else {
      others_may_fill |= sequence->request->deterministic;
    }
  }
  verifies_ = !full_.empty() && (full_.size() >= options_.group || !others_may_fill) &&
              !ShouldWait(running);
  if (!verifies_) return {};
  // Others are preempted where pages are short.
  return TakeWindows({.rows = room.rows, .pages = INT64_MAX, .page_size = room.page_size});
}

std::vector<Sequence*> FastPath::TakeWindows(GuessRoom room) const {
  std::vector<Sequence*> windows;
  for (Sequence* sequence : full_) {
    if (windows.size() == options_.group) break;
    // It may have been preempted meanwhile.
    if (sequence->turn != Sequence::Turn::kHeld) continue;
    room.rows -= static_cast<int64_t>(sequence->candidates.size()) + 1;
    room.pages -= CeilDiv<int64_t>(NumTokens(*sequence), room.page_size) -
                  static_cast<int64_t>(sequence->state.size());
    if (room.rows < 0 || room.pages < 0) break;
    sequence->guesses = std::exchange(sequence->candidates, {});
    sequence->guesses_were_candidates = true;
    sequence->candidates_end = false;
    windows.push_back(sequence);
  }
  return windows;
}

std::vector<Sequence*> FastPath::Fill(absl::Span<Sequence* const> /*running*/, size_t num_going_on,
                                      const GuessRoom& room, ScheduledStep& step) {
  // INVARIANT: what the fast path has computed is never cached (FastPathTest.*).
  for (size_t i = num_going_on; i < step.sequences.size(); ++i) {
    Sequence& starting = *step.sequences[i];
    if (!starting.request->deterministic) starting.num_exact = NumTokens(starting);
  }
  if (verifies_) return {};
  const bool exact = step.sequences.size() > num_going_on ||
                     std::ranges::any_of(step.sequences, [](const Sequence* sequence) {
                       return sequence->request->deterministic && NumRows(*sequence) > 1;
                     });
  if (exact) return TakeWindows(room);
  step.provisional = true;
  counts_.steps += num_going_on > 0 ? 1 : 0;
  return {};
}

void FastPath::Settle(const Sequence& /*sequence*/, const GuessResult& result) {
  const auto right = static_cast<int64_t>(result.right);
  ++counts_.drafts;
  counts_.rollbacks += result.right < result.guesses ? 1 : 0;
  counts_.draft_tokens += right;
  counts_.accepted_tokens += right;
  Drop(result.guesses - result.right);
}

void FastPath::Drop(size_t candidates) {
  counts_.draft_tokens += static_cast<int64_t>(candidates);
  counts_.recomputed += static_cast<int64_t>(candidates);
}

GuesserInfo FastPath::info() const {
  const FastPathCounts& c = counts_;
  const char* const tokens = "isobit_fast_path_tokens_total";
  const char* const help =
      "Tokens of the fast path for requests that must be deterministic, by what became of them.";
  return {.drafters = {{"fast_path", &c}},
          .more_counts =
              {{"isobit_fast_path_steps_total", "Steps that the fast path computed.", {}, &c.steps},
               {"isobit_fast_path_windows_total",
                "Windows of tokens of the fast path that were verified.",
                {},
                &c.drafts},
               {"isobit_fast_path_rollbacks_total",
                "Of them, those in which a token was not what the contract draws.",
                {},
                &c.rollbacks},
               {tokens, help, {{"outcome", "verified"}}, &c.accepted_tokens},
               {tokens, help, {{"outcome", "recomputed"}}, &c.recomputed}},
          .verify_window = options_.window,
          .verify_group = options_.group};
}

}  // namespace isobit
