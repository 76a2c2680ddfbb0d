// What a linear layer does with a finished sum: bias, rounding, SwiGLU, and the store.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_OUTPUT_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_OUTPUT_CUH_

#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/common/device/partial_push.cuh"
#include "kernels/cuda/common/device/swiglu.cuh"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/linear_shape.h"

namespace isobit::cuda {

enum class LinearOutput { kBf16, kFp32, kSwiGlu };

inline LinearOutput OutputOf(const LinearArgs& args) {
  if (args.swiglu_out != nullptr) return LinearOutput::kSwiGlu;
  return args.fp32_out != nullptr ? LinearOutput::kFp32 : LinearOutput::kBf16;
}

// The output as used by the kernels; passed by value.
struct LinearTarget {
  void* y = nullptr;  // [m, ...] of float for kFp32, else of bf16
  int64_t ldy = 0;
  const float* bias = nullptr;
  int32_t m = 0;
  int32_t n = 0;    // columns of y; if gated, only of its gates
  int32_t ups = 0;  // gated: y's first column of ups (bf16, fp32), and that of bias; else 0
  bool gated = false;
  bool pushes = false;  // kFp32: sums go to the ranks of `push`, not to y
  bool pairs = false;   // kBf16, kSwiGlu: pairs of columns, the first even, can be stored at once
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

// Transposes an 8 x 8 matrix of bf16; lane l has two neighbours in row l / 4.
__device__ __forceinline__ uint32_t Transpose8x8(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Transposes a 4 x 4 matrix over four lanes with a distance of kStride: v is row 2 * high + odd.
template <int kStride, typename T>
__device__ __forceinline__ void Transpose4x4(T (&v)[4], bool odd, bool high) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const T got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], kStride);
    (odd ? v[i] : v[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const T got = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 2], 2 * kStride);
    (high ? v[i] : v[i + 2]) = got;
  }
}

// Stores a pair of columns of each of the rows row, row + 8, ... that are below m.
template <int kPairs>
__device__ __forceinline__ void StorePairs(const LinearTarget& target, int32_t row, int32_t column,
                                           int32_t end, const uint32_t (&pairs)[kPairs]) {
  Bf16* const y = static_cast<Bf16*>(target.y) + row * target.ldy + column;
  if (target.pairs && column + 1 < end) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (row + 8 * i < target.m) *reinterpret_cast<uint32_t*>(y + 8 * i * target.ldy) = pairs[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (row + 8 * i >= target.m) continue;
    if (column < end) y[8 * i * target.ldy] = static_cast<Bf16>(pairs[i]);
    if (column + 1 < end) y[8 * i * target.ldy + 1] = static_cast<Bf16>(pairs[i] >> 16);
  }
}

// The successor of a pushing block is the sum over ranks, which does not wait for this kernel
// (sm90/collective/all_reduce.cuh). So such a block lets it start only when everything before this
// kernel has ended. Any other block lets its successor start at once. One thread of the block calls
// ReleaseAtStart at its start and ReleaseAfterWait after WaitForPredecessor.
__device__ __forceinline__ void ReleaseAtStart(const LinearTarget& target) {
  if (!target.pushes) ReleaseSuccessor();
}
__device__ __forceinline__ void ReleaseAfterWait(const LinearTarget& target) {
  if (target.pushes) ReleaseSuccessor();
}

// The operation to which a push belongs. Call it after WaitForPredecessor.
__device__ __forceinline__ uint32_t OperationOf(const LinearTarget& target) {
  return target.pushes ? NextOperation(target.push) : 0;
}

// Pushes units that the warp has as in FinishUnits. A 4 x 4 transposition over the lanes of four
// neighbouring columns gives each lane four columns of one row of each unit.
template <int kUnits>
__device__ __forceinline__ void PushUnits(const LinearTarget& target, int32_t first_column,
                                          int32_t first_row, const float (&sums)[4 * kUnits],
                                          uint32_t operation) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool odd = (lane & 4) != 0;
  const bool high = (lane & 8) != 0;
  float4 quads[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    float v[4] = {sums[4 * u], sums[4 * u + 1], sums[4 * u + 2], sums[4 * u + 3]};
    Transpose4x4<4>(v, odd, high);
    quads[u] = {v[0], v[1], v[2], v[3]};
  }
  const int32_t row = first_row + 2 * (lane % 4) + (odd ? 1 : 0);
  const int32_t column = first_column + (high ? 8 : 0) + lane / 16 * 4;
  PushQuads(target.push, operation, row, target.m, column / 4, quads);
}

// Finishes kUnits units of 16 packed weight rows x 8 rows of x: the same weight rows, consecutive
// rows of x. A warp has a unit as the fragment of a product whose first operand is the weights:
// lane l has the sums (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1), g = l / 4, q = l % 4.
// first_row: packed, a multiple of 16; first_x_row: a multiple of 8. At the end of a kernel a warp
// is alone on its scheduler. So units are finished together: they share addresses, and the
// instructions of one fill the latencies of another.
template <LinearOutput kOutput, int kUnits>
__device__ __forceinline__ void FinishUnits(const LinearTarget& target, int32_t first_row,
                                            int32_t first_x_row, float (&sums)[4 * kUnits],
                                            uint32_t operation) {
  const int32_t g = static_cast<int32_t>(threadIdx.x) % 32 / 4;
  const int32_t q = static_cast<int32_t>(threadIdx.x) % 4;
  // Rows 0-7 of a unit are y's columns from `low` on, rows 8-15 its columns from `high` on.
  const int32_t low = target.gated ? first_row / 2 : first_row;
  const int32_t high = target.gated ? target.ups + low : low + 8;
  const int32_t low_end = target.n;
  const int32_t high_end = target.ups + target.n;
  if (target.bias != nullptr) {
    const auto add = [&](int first, float bias) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        sums[4 * u + first] = contract::Add(sums[4 * u + first], bias);
        sums[4 * u + first + 1] = contract::Add(sums[4 * u + first + 1], bias);
      }
    };
    if (low + g < low_end) add(0, target.bias[low + g]);
    if (high + g < high_end) add(2, target.bias[high + g]);
  }
  if constexpr (kOutput == LinearOutput::kFp32) {
    if (target.pushes) {
      return PushUnits<kUnits>(target, first_row, first_x_row, sums, operation);
    }
    const int32_t row = first_x_row + 2 * q;
    float* const y = static_cast<float*>(target.y) + row * target.ldy + low + g;
    const bool has_low = low + g < low_end;
    const bool has_high = high + g < high_end;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* const at = y + (8 * u + i) * target.ldy;
        const bool in = row + 8 * u + i < target.m;
        if (in && has_low) at[0] = sums[4 * u + i];
        if (in && has_high) at[high - low] = sums[4 * u + 2 + i];
      }
    }
  } else {
    // Four pairs at a time hide SwiGLU's latency and leave registers for the pending sums.
    constexpr int kPairs = kOutput == LinearOutput::kSwiGlu && kUnits > 4 ? 4 : kUnits;
#pragma unroll
    for (int u = 0; u < kUnits; u += kPairs) {
      uint32_t lows[kPairs];
      uint32_t highs[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float* sum = sums + 4 * (u + i);
        lows[i] = PackBf16(sum[0], sum[1]);
        highs[i] = PackBf16(sum[2], sum[3]);
      }
      const auto store = [&](int32_t column, int32_t end, uint32_t(&pairs)[kPairs]) {
#pragma unroll
        for (uint32_t& pair : pairs) pair = Transpose8x8(pair);
        StorePairs(target, first_x_row + 8 * u + g, column + 2 * q, end, pairs);
      };
      if constexpr (kOutput == LinearOutput::kSwiGlu) {
        uint32_t products[kPairs];
        SwiGluPairs(lows, highs, products);
        store(low, low_end, products);
      } else {
        store(low, low_end, lows);
        store(high, high_end, highs);
      }
    }
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_OUTPUT_CUH_
