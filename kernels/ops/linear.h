// Linear layers: with packed weights (serving), with row-major weights (training), and the
// gradients of their inputs, weights and biases.
#ifndef ISOBIT_KERNELS_OPS_LINEAR_H_
#define ISOBIT_KERNELS_OPS_LINEAR_H_

#include <cstdint>

#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/portable.h"
#include "kernels/ops/linear_shape.h"
#include "kernels/ops/packs.h"

namespace isobit {

struct PartialPush;  // CUDA backend only: kernels/cuda/common/device/partial_push.cuh

// y[m, n] = round(combine(leaves of x[m, k] . W^T) + bias). bf16_out: y is rounded to bf16.
// fp32_out: y is fp32, for logits and for the partial sum of a row-parallel layer, which covers
// this rank's subtree of the leaves and has no bias. swiglu_out: y, of a gated weight, is rounded
// to bf16, then SwiGLU is applied.
struct LinearArgs {
  const Bf16* x = nullptr;  // [m, k], leading dimension ldx
  int64_t ldx = 0;
  int64_t m = 0;
  LinearWeight weight;
  const float* bias = nullptr;  // [n] or null
  Bf16* bf16_out = nullptr;     // [m, n]: exactly one of the three outputs is set
  float* fp32_out = nullptr;    // [m, n]
  Bf16* swiglu_out = nullptr;   // [m, n / 2]
  int64_t ldy = 0;
  const PartialPush* push = nullptr;  // from AllReduce::Push: takes the sums instead of fp32_out
};

// A weight [n, columns] as one to three stacked matrices: q, k and v; or gate and up.
inline constexpr int kMaxParts = 3;
struct StackedWeight {
  int parts = 1;
  const Bf16* data[kMaxParts] = {};  // [rows[i], columns], contiguous
  int64_t rows[kMaxParts] = {};
  int64_t columns = 0;
  int64_t n() const { return rows[0] + rows[1] + rows[2]; }
};

// LinearArgs for such a weight: y = round(combine(leaves of x . W^T) + bias). Exactly one output is
// set. With `residual`, bf16_out is AddResidual(residual, sum, bias).
struct StackedLinearArgs {
  const Bf16* x = nullptr;  // [m, columns], leading dimension ldx
  int64_t ldx = 0;
  int64_t m = 0;
  StackedWeight weight;
  contract::LeafPlan leaves;  // of the columns
  contract::LeafSum sum = contract::LeafSum::kChain;
  const float* bias = nullptr;     // [n] or null
  const Bf16* residual = nullptr;  // [m, n] or null
  Bf16* bf16_out = nullptr;        // [m, n]; may be residual
  float* fp32_out = nullptr;       // [m, n]
};

struct InputGradientArgs {
  const Bf16* dy = nullptr;  // [m, n], leading dimension lddy
  int64_t lddy = 0;
  int64_t m = 0;
  StackedWeight weight;
  Bf16* dx = nullptr;  // [m, columns]
};

// dw[i]: those rows of the weight's gradient that belong to matrix i.
struct WeightGradientArgs {
  const Bf16* dy = nullptr;  // [rows, n], leading dimension lddy
  int64_t lddy = 0;
  const Bf16* x = nullptr;  // [rows, columns], leading dimension ldx
  int64_t ldx = 0;
  PackBounds packs;
  int parts = 1;
  int64_t part_rows[kMaxParts] = {};
  int64_t columns = 0;
  float* dw[kMaxParts] = {};  // [part_rows[i], columns]
  // Only with a single pack: its chain continues from what dw holds. The number of rows before
  // these must have been a multiple of 16.
  bool continues = false;
};

// out[c] = the sum of column c of x over the packs (a bias's gradient).
struct ColumnSumsArgs {
  const Bf16* x = nullptr;  // [rows, columns], leading dimension ldx
  int64_t ldx = 0;
  int64_t columns = 0;
  PackBounds packs;
  float* out = nullptr;  // [columns]
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_LINEAR_H_
