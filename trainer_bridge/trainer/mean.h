// Mean and deviation of at least one float64 number, summed in the order given.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_MEAN_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_MEAN_H_

#include <cmath>

#include "absl/types/span.h"

namespace isobit::trainer {

inline double Mean(absl::Span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// The standard deviation, as of a population, not a sample.
inline double Deviation(absl::Span<const double> values) {
  const double mean = Mean(values);
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(values.size()));
}

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_MEAN_H_
