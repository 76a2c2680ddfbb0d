// One rank's slice of a linear layer: its shape, with the leaves of its sums, and its packed
// weight.
#ifndef ISOBIT_KERNELS_OPS_LINEAR_SHAPE_H_
#define ISOBIT_KERNELS_OPS_LINEAR_SHAPE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/portable.h"

namespace isobit {

// One rank's slice of a weight matrix W [n, k] (n output features), with its columns' leaves.
struct LinearShape {
  int64_t n = 0;
  int64_t k = 0;           // columns on this rank
  int num_leaves = 0;      // 8, or 8/W for a row-parallel layer on W ranks
  int64_t bounds[9] = {};  // leaf i has columns [bounds[i], bounds[i+1]); bounds[num_leaves] == k
  contract::LeafSum sum = contract::LeafSum::kChain;
  bool gated = false;  // gate_up_proj: rows [0, n/2) are gate_proj, [n/2, n) up_proj
};

// A packed weight matrix.
struct LinearWeight {
  LinearShape shape;
  const std::byte* packed = nullptr;  // WeightPacker::PackedBytes(shape) bytes, 128-byte aligned
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_LINEAR_SHAPE_H_
