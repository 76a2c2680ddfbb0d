// LLM-42's scheme (docs/architecture/speculation.md). Sequences decode on a fast path that promises
// no bits. The tokens that it draws for deterministic requests are candidates. A step of the
// contract later verifies windows of several sequences together: it computes their candidates as
// guesses. A candidate that the contract would not have drawn is rolled back, with all candidates
// behind it.
//
// A step is fast unless it starts a sequence or verifies windows. Windows are verified once a whole
// group is full, or once all that can become full are; they are then placed first. A step that
// starts sequences also verifies full windows, as far as there is room.
#ifndef ISOBIT_ROLLOUT_GUESSES_FAST_PATH_FAST_PATH_H_
#define ISOBIT_ROLLOUT_GUESSES_FAST_PATH_FAST_PATH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "rollout/schedule/guesser.h"

namespace isobit {

struct FastPathOptions {
  // Rows of a sequence in a verification: its last token and window - 1 candidates, at least 1.
  size_t window = 16;
  size_t group = 1;  // sequences to verify together, if so many are ready
};

// `drafts` are windows that were verified, `draft_tokens` candidates, verified or dropped.
struct FastPathCounts : DraftCounts {
  std::atomic<int64_t> steps = 0;       // computed by the fast path
  std::atomic<int64_t> rollbacks = 0;   // windows with a wrong candidate
  std::atomic<int64_t> recomputed = 0;  // candidates that were dropped
};

class FastPath final : public Guesser {
 public:
  // As --verify_window and --verify_group say; with group 0, as many windows as a step has room
  // for, up to 32. A group must fit into a step.
  static MakeGuesser Maker(const FastPathOptions& options);

  explicit FastPath(const FastPathOptions& options) : options_(options) {}

  std::vector<Sequence*> Plan(absl::Span<Sequence* const> running, const GuessRoom& room) override;
  std::vector<Sequence*> Fill(absl::Span<Sequence* const> running, size_t num_going_on,
                              const GuessRoom& room, ScheduledStep& step) override;
  void Settle(const Sequence& sequence, const GuessResult& result) override;
  void Drop(size_t candidates) override;
  void End(Sequence& /*sequence*/) override {}
  GuesserInfo info() const override;

  const FastPathCounts& counts() const { return counts_; }

 private:
  // Whether the sequence may have no further candidate.
  bool IsFull(const Sequence& sequence) const;
  // Makes guesses of the candidates of the oldest full windows that fit, at most a group.
  std::vector<Sequence*> TakeWindows(GuessRoom room) const;

  const FastPathOptions options_;
  FastPathCounts counts_;
  // Of the step that is being scheduled:
  std::vector<Sequence*> full_;  // whose windows are ready
  bool verifies_ = false;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_GUESSES_FAST_PATH_FAST_PATH_H_
