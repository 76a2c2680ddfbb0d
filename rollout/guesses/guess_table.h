// How many tokens to guess for a sequence: a pure function of how many sequences run and of how
// often guesses were right. It uses measured times of steps; nothing is timed while serving.
#ifndef ISOBIT_ROLLOUT_GUESSES_GUESS_TABLE_H_
#define ISOBIT_ROLLOUT_GUESSES_GUESS_TABLE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace isobit {

// A time, in any unit, for a number of sequences or rows.
struct StepCost {
  double number = 0.0;
  double time = 0.0;
};

// Times of steps, measured by `isobit-bench decode --decode_guesses`
// (docs/architecture/speculation.md). A step of n sequences and r > n rows takes decode(n) +
// rows(r) - rows(n) + alone + n * alone_of_sequence. Numbers ascend. Times are interpolated between
// entries; outside the entries of `rows` they are extrapolated from the nearest two. With more
// sequences than the last entry of `decode`, nothing is guessed.
struct StepCosts {
  std::vector<StepCost> decode;  // of steps with one row per sequence, by sequences
  std::vector<StepCost> rows;    // of a step's rows, without reading keys and values
  // Extra time of a step with guesses, because no other step is prepared while it is computed; and
  // the extra time for each of its sequences.
  double alone = 0.0;
  double alone_of_sequence = 0.0;
  // The speed-up that must be expected before guesses are used, because other machines, models and
  // loads have other times.
  double least_gain = 1.1;
};
StepCosts CpuStepCosts();
// weight_bytes: of one rank; the time of a step depends mostly on them.
StepCosts GpuStepCosts(double weight_bytes, int num_ranks);

class GuessTable {
 public:
  // most: bound of the guesses for a sequence in a step.
  GuessTable(const StepCosts& costs, size_t max_running, size_t most);

  // The number of guesses with the most expected tokens per time if each of num_running sequences
  // has it; 0 if none reaches the speed-up least_gain. acceptance, in [0, 1]: the probability that
  // a guess is right if those before it are.
  size_t Guesses(size_t num_running, double acceptance) const;

  // The expected number of tokens that so many guesses add for a sequence.
  static double ExpectedTokens(size_t guesses, double acceptance);

  // Whether a step of num_sequences should compute `guesses` guesses, from which `tokens` more
  // tokens are expected.
  bool IsWorthIt(size_t num_sequences, size_t guesses, double tokens) const;

  // The time of a step of so many sequences with so many guesses in total.
  double TimeOfStep(double sequences, double guesses) const;

 private:
  static constexpr size_t kClasses = 20;  // levels of acceptance

  const StepCosts costs_;
  std::vector<std::array<uint8_t, kClasses + 1>> guesses_;  // by running sequences
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_GUESSES_GUESS_TABLE_H_
