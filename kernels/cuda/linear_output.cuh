// What a linear layer does with a finished sum: bias, rounding, SwiGLU, and the store.
#ifndef ISOBIT_KERNELS_CUDA_LINEAR_OUTPUT_CUH_
#define ISOBIT_KERNELS_CUDA_LINEAR_OUTPUT_CUH_

#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/mma_sync.cuh"
#include "kernels/cuda/device/partial_push.cuh"
#include "kernels/cuda/device/swiglu.cuh"
#include "kernels/cuda/linear_layout.h"
#include "kernels/ops.h"

namespace isobit::cuda {

enum class LinearOutput { kBf16, kFp32, kSwiGlu };

inline LinearOutput OutputOf(const LinearArgs& args) {
  if (args.swiglu_out != nullptr) return LinearOutput::kSwiGlu;
  return args.fp32_out != nullptr ? LinearOutput::kFp32 : LinearOutput::kBf16;
}

// The output as the kernels see it; passed by value.
struct LinearTarget {
  void* y = nullptr;  // [m, ...] of float for kFp32, else of bf16
  int64_t ldy = 0;
  const float* bias = nullptr;
  int32_t m = 0;
  int32_t n = 0;    // columns of y; of one half if gated
  int32_t ups = 0;  // gated: y's column of the first up (bf16, fp32) and bias'; else 0
  bool gated = false;
  bool pushes = false;  // kFp32: to the ranks that `push` names, not to y
  bool pairs = false;   // kBf16, kSwiGlu: two columns from an even one on can be stored at once
  PartialPush push = {};
};

inline LinearTarget TargetOf(const LinearArgs& args) {
  const LinearShape& shape = args.weight.shape;
  LinearTarget target;
  target.pushes = args.push != nullptr;
  if (target.pushes) target.push = *args.push;
  target.ldy = args.ldy;
  target.bias = args.bias;
  target.m = static_cast<int32_t>(args.m);
  target.gated = shape.gated;
  target.n = static_cast<int32_t>(shape.gated ? shape.n / 2 : shape.n);
  target.ups = shape.gated ? target.n : 0;
  switch (OutputOf(args)) {
    case LinearOutput::kBf16:
      target.y = args.bf16_out;
      break;
    case LinearOutput::kFp32:
      target.y = args.fp32_out;
      break;
    case LinearOutput::kSwiGlu:
      target.y = args.swiglu_out;
      break;
  }
  const bool even_ups = args.swiglu_out != nullptr || target.ups % 2 == 0;
  target.pairs = reinterpret_cast<uintptr_t>(target.y) % 4 == 0 && args.ldy % 2 == 0 && even_ups;
  return target;
}

// The 8 x 8 matrix of bf16 whose row g lane l has as two neighbours, g = l / 4, transposed.
__device__ __forceinline__ uint32_t Transpose8x8(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

__device__ __forceinline__ void StorePair(const LinearTarget& target, int32_t row, int32_t column,
                                          int32_t end, uint32_t pair) {
  if (row >= target.m || column >= end) return;
  Bf16* y = static_cast<Bf16*>(target.y) + row * target.ldy + column;
  if (target.pairs && column + 1 < end) {
    *reinterpret_cast<uint32_t*>(y) = pair;
    return;
  }
  y[0] = static_cast<Bf16>(pair);
  if (column + 1 < end) y[1] = static_cast<Bf16>(pair >> 16);
}

// contract::SwiGlu of the low halves.
__device__ __forceinline__ uint32_t SwiGluOf(uint32_t gate, uint32_t up) {
  const float g = contract::Bf16ToFloat(static_cast<Bf16>(gate));
  const float sigmoid = g >= kLeastModerateGate ? SigmoidOfModerate(g) : contract::Sigmoid(g);
  return contract::FloatToBf16(
      contract::Mul(contract::Mul(g, sigmoid), contract::Bf16ToFloat(static_cast<Bf16>(up))));
}

// A block that pushes lets its successor, the sum over ranks, start when all before this kernel has
// ended, because the sum does not wait for this kernel (all_reduce.cuh); any other lets it start at
// once. One thread of the block calls the first at its start and the second after
// WaitForPredecessor.
__device__ __forceinline__ void ReleaseAtStart(const LinearTarget& target) {
  if (!target.pushes) ReleaseSuccessor();
}
__device__ __forceinline__ void ReleaseAfterWait(const LinearTarget& target) {
  if (target.pushes) ReleaseSuccessor();
}

// The operation that a push belongs to. After WaitForPredecessor.
__device__ __forceinline__ uint32_t OperationOf(const LinearTarget& target) {
  return target.pushes ? NextOperation(target.push) : 0;
}

// Pushes 16 columns x 8 rows, held as in FinishUnit: a 4 x 4 transposition over the lanes of four
// neighbouring columns gives each lane four columns of one row.
__device__ __forceinline__ void PushUnit(const LinearTarget& target, int32_t first_column,
                                         int32_t first_row, float4 sum, uint32_t operation) {
  float v[4] = {sum.x, sum.y, sum.z, sum.w};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool odd = (lane & 4) != 0;
  const bool high = (lane & 8) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const float got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 4);
    (odd ? v[i] : v[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float got = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 2], 8);
    (high ? v[i] : v[i + 2]) = got;
  }
  const int32_t row = first_row + 2 * (lane % 4) + (odd ? 1 : 0);
  const int32_t column = first_column + (high ? 8 : 0) + lane / 16 * 4;
  if (row < target.m) PushQuad(target.push, operation, row, column / 4, {v[0], v[1], v[2], v[3]});
}

// Finishes 16 packed weight rows x 8 rows of x, held by a warp as a product with the weights as its
// first operand: lane l has the sums (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1), g = l / 4,
// q = l % 4. first_row: packed, a multiple of 16; first_x_row: a multiple of 8.
template <LinearOutput kOutput>
__device__ __forceinline__ void FinishUnit(const LinearTarget& target, int32_t first_row,
                                           int32_t first_x_row, float4 sum, uint32_t operation) {
  const int32_t g = static_cast<int32_t>(threadIdx.x) % 32 / 4;
  const int32_t q = static_cast<int32_t>(threadIdx.x) % 4;
  // Rows 0-7 of the unit are y's columns `low` and on, rows 8-15 are `high` and on.
  const int32_t low = target.gated ? first_row / 2 : first_row;
  const int32_t high = target.gated ? target.ups + low : low + 8;
  const int32_t low_end = target.n;
  const int32_t high_end = target.ups + target.n;
  if (target.bias != nullptr) {
    if (low + g < low_end) {
      const float bias = target.bias[low + g];
      sum.x = contract::Add(sum.x, bias);
      sum.y = contract::Add(sum.y, bias);
    }
    if (high + g < high_end) {
      const float bias = target.bias[high + g];
      sum.z = contract::Add(sum.z, bias);
      sum.w = contract::Add(sum.w, bias);
    }
  }
  if constexpr (kOutput == LinearOutput::kFp32) {
    if (target.pushes) return PushUnit(target, first_row, first_x_row, sum, operation);
    float* y = static_cast<float*>(target.y) + (first_x_row + 2 * q) * target.ldy;
    const bool first = first_x_row + 2 * q < target.m;
    const bool second = first_x_row + 2 * q + 1 < target.m;
    if (low + g < low_end) {
      if (first) y[low + g] = sum.x;
      if (second) y[target.ldy + low + g] = sum.y;
    }
    if (high + g < high_end) {
      if (first) y[high + g] = sum.z;
      if (second) y[target.ldy + high + g] = sum.w;
    }
  } else if constexpr (kOutput == LinearOutput::kBf16) {
    const uint32_t low_pair = Transpose8x8(PackBf16(sum.x, sum.y));
    const uint32_t high_pair = Transpose8x8(PackBf16(sum.z, sum.w));
    StorePair(target, first_x_row + g, low + 2 * q, low_end, low_pair);
    StorePair(target, first_x_row + g, high + 2 * q, high_end, high_pair);
  } else {
    const uint32_t gates = PackBf16(sum.x, sum.y);
    const uint32_t ups = PackBf16(sum.z, sum.w);
    const uint32_t even = SwiGluOf(gates, ups);
    const uint32_t odd = SwiGluOf(gates >> 16, ups >> 16);
    StorePair(target, first_x_row + g, low + 2 * q, low_end, Transpose8x8(even | odd << 16));
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LINEAR_OUTPUT_CUH_
