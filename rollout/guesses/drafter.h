// Drafters guess what a sequence will draw next. A guess can change speed, never a token: a guess
// counts only if the sequence draws the same token (docs/architecture/speculation.md).
//
// A new drafter is one file that implements Drafter, and two lines in drafters.{h,cc}. When and how
// much to guess is decided elsewhere (speculation.h).
#ifndef ISOBIT_ROLLOUT_GUESSES_DRAFTER_H_
#define ISOBIT_ROLLOUT_GUESSES_DRAFTER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "rollout/schedule/request.h"

namespace isobit {

// A drafter's state for one sequence.
class SequenceDrafter {
 public:
  virtual ~SequenceDrafter() = default;

  // Appends at most `most` tokens that may follow `tokens`, in order, all within the vocabulary.
  // `tokens`: the known tokens of the sequence, prompt first. Between calls, tokens are only
  // appended.
  virtual void Guess(absl::Span<const int32_t> tokens, size_t most,
                     std::vector<int32_t>& guesses) = 0;
};

// Used by the engine thread alone.
class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual const char* name() const = 0;  // in --speculation and in metrics

  // Called at the first guess for a running sequence. Null: the drafter has no guesses for it.
  virtual std::unique_ptr<SequenceDrafter> Begin(const Sequence& sequence) = 0;

  // A sequence ends, whether or not Begin was called for it. Its tokens can still be read.
  virtual void End(const Sequence& /*sequence*/) {}
};

// How well one drafter has guessed for a sequence.
struct DrafterRecord {
  std::unique_ptr<SequenceDrafter> drafter;
  double acceptance = 0.0;  // share of right guesses; the latest weigh most
  // A guess without a row in a step, compared with the token at compared_place once that is known.
  int32_t compared_guess = 0;
  size_t compared_place = SIZE_MAX;  // SIZE_MAX: no guess to compare
};

// The state of speculation for one sequence.
struct SequenceDraft {
  std::vector<DrafterRecord> records;  // by drafter
  size_t num_guesses = 0;        // that it has, or probably gets once its pending token is known
  double expected_tokens = 0.0;  // that these guesses bring
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_GUESSES_DRAFTER_H_
