// How many tokens are guessed for a sequence: a pure function of how many sequences run and how
// well guesses have done. It weighs measured times of steps; nothing is timed while serving.
#ifndef ISOBIT_ROLLOUT_GUESS_TABLE_H_
#define ISOBIT_ROLLOUT_GUESS_TABLE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace isobit {

// A time, in any unit, by a number of sequences or rows.
struct StepCost {
  double number = 0.0;
  double time = 0.0;
};

// What steps cost, from `isobit-bench decode --decode_guesses` (docs/architecture/speculation.md).
// A step of n sequences and r > n rows takes decode(n) + rows(r) - rows(n) + alone +
// n alone_of_sequence. Numbers ascend; between two entries the time is interpolated, below the
// first and beyond the last of `rows` it goes on as between the two nearest. Nothing is guessed for
// more sequences than `decode` has.
struct StepCosts {
  std::vector<StepCost> decode;  // steps of one row a sequence, by sequences
  std::vector<StepCost> rows;    // what a step's rows cost beside reading keys and values
  // What a step takes longer because no other is prepared while it is computed; and for each of its
  // sequences.
  double alone = 0.0;
  double alone_of_sequence = 0.0;
  // How much more guessing must promise than not guessing: other machines, models and loads have
  // other times.
  double least_gain = 1.1;
};
StepCosts CpuStepCosts();
// weight_bytes: of a rank, on which the time of a step depends most.
StepCosts GpuStepCosts(double weight_bytes, int num_ranks);

class GuessTable {
 public:
  // most: guesses of a sequence in a step.
  GuessTable(const StepCosts& costs, size_t max_running, size_t most);

  // The number of guesses for each of num_running such sequences that promises the most tokens in a
  // time, 0 unless they pay for certain. acceptance: how likely a guess is right if those before it
  // are, in [0, 1].
  size_t Guesses(size_t num_running, double acceptance) const;

  // Tokens beyond its first that a sequence gets by so many guesses, in the mean.
  static double Promise(size_t guesses, double acceptance);

  // Whether a step of so many sequences is worth its guesses: all of them together promise so many
  // tokens more.
  bool Pay(size_t num_sequences, size_t guesses, double tokens) const;

  // Of a step in which these sequences have so many guesses together.
  double TimeOfStep(double sequences, double guesses) const;

 private:
  static constexpr size_t kClasses = 20;  // of acceptance

  const StepCosts costs_;
  std::vector<std::array<uint8_t, kClasses + 1>> guesses_;  // by running sequences
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_GUESS_TABLE_H_
