// Sums, means and deviations of float64 numbers that are rounded once, so that no order of the
// numbers changes a bit, and Python's math.fsum gives the same.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_EXACT_SUM_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_EXACT_SUM_H_

#include "absl/types/span.h"

namespace isobit::trainer {

// The exact sum, rounded to nearest even. If a number is not finite, neither is the result.
double ExactSum(absl::Span<const double> values);

// Their sum divided by how many there are, which is at least one.
double Mean(absl::Span<const double> values);

// The standard deviation of all of them, which are at least one (not of a sample from them).
double Deviation(absl::Span<const double> values);

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_EXACT_SUM_H_
