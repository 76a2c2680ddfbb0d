// The sums of which the digest of weights is made.
#ifndef ISOBIT_KERNELS_OPS_WEIGHT_SUMS_H_
#define ISOBIT_KERNELS_OPS_WEIGHT_SUMS_H_

#include <cstdint>

#include "kernels/ops/stored_weights.h"

namespace isobit {

// Adds the digest sums of a slice of a tensor, whose values are rounded to bf16 (docs/API.md, "The
// weight digest"), to sums[0] and sums[1]; sums[2]: see kWeightSums. part.first_column is a
// multiple of 4, and so is the number of columns unless the slice ends its rows.
struct WeightSumsArgs {
  StoredMatrix from;
  PartOfTensor part;
  uint64_t* sums = nullptr;  // [kWeightSums]
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_WEIGHT_SUMS_H_
