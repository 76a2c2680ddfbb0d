// Who guesses what a sequence will draw next. A guess can change speed, never a token: a sequence
// keeps the guesses that its own draws repeat (docs/architecture/speculation.md).
//
// A new drafter is one file that implements Drafter, and a line in drafters.cc. Not here: when and
// how much is guessed (speculation.h).
#ifndef ISOBIT_ROLLOUT_DRAFTER_H_
#define ISOBIT_ROLLOUT_DRAFTER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"

namespace isobit {

struct Sequence;

// What a drafter knows of one sequence.
class SequenceDrafter {
 public:
  virtual ~SequenceDrafter() = default;

  // Appends at most `most` tokens that may follow `tokens`, in order; every one is within the
  // vocabulary. `tokens`: the known tokens of the sequence, prompt first; from call to call some
  // are appended, none is taken away.
  virtual void Guess(absl::Span<const int32_t> tokens, size_t most,
                     std::vector<int32_t>& guesses) = 0;
};

// For the engine thread alone.
class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual const char* name() const = 0;  // in --speculation and in metrics

  // For a sequence that is about to run, at its first guess. Null: it has nothing to say about it.
  virtual std::unique_ptr<SequenceDrafter> Begin(const Sequence& sequence) = 0;

  // A sequence ends, whether or not it has been begun; its tokens are still there.
  virtual void End(const Sequence& /*sequence*/) {}
};

// How one drafter has done for a sequence.
struct DrafterRecord {
  std::unique_ptr<SequenceDrafter> drafter;
  double acceptance = 0.0;  // share of its guesses that were right, the latest weighing most
  // A guess that is only compared with the token at its place, once that is known.
  int32_t compared_guess = 0;
  size_t compared_place = SIZE_MAX;  // SIZE_MAX: there is none
};

// A sequence's part in speculation.
struct SequenceDraft {
  std::vector<DrafterRecord> records;  // by drafter
  size_t drafter = 0;                  // whose guesses Sequence::guesses are
  bool is_expected = false;  // the sequence waits for its pending token, to be guessed for then
  size_t num_guesses = 0;    // those it has, or expects
  double promise = 0.0;      // tokens that they bring, in the mean
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_DRAFTER_H_
