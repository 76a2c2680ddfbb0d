// Sums, means and deviations of float64 numbers that are rounded only once, so that the order of
// the numbers changes no bit and the results equal those of Python's math.fsum.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_EXACT_SUM_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_EXACT_SUM_H_

#include "absl/types/span.h"

namespace isobit::trainer {

// The exact sum, rounded to nearest even. If a number is not finite, neither is the result.
double ExactSum(absl::Span<const double> values);

// The sum divided by the number of values, which is at least one.
double Mean(absl::Span<const double> values);

// The standard deviation of at least one value, as of a population, not a sample.
double Deviation(absl::Span<const double> values);

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_EXACT_SUM_H_
