// From a wgmma fragment of finished sums to y: bias, rounding, SwiGLU, and stores of whole sectors.
//
// A fragment is 64 rows by 8 G packed columns over a warpgroup; a group is 8 packed columns. A
// gated weight's groups alternate between gates and ups.
#ifndef ISOBIT_KERNELS_CUDA_LINEAR_TILE_OUTPUT_CUH_
#define ISOBIT_KERNELS_CUDA_LINEAR_TILE_OUTPUT_CUH_

#include <cstdint>

#include "kernels/contract/row_functions.h"
#include "kernels/cuda/device/mma_sync.cuh"
#include "kernels/cuda/device/swiglu.cuh"
#include "kernels/cuda/linear_output.cuh"
#include "kernels/ops.h"

namespace isobit::cuda::tile {

// Where y's columns of a group begin, and how many there are: 8 or more, fewer at the edge, or
// none.
struct GroupColumns {
  int32_t column;
  int32_t count;
};
__device__ __forceinline__ GroupColumns ColumnsOf(const LinearTarget& target, int group) {
  if (!target.gated) return {8 * group, target.n - 8 * group};
  const int column = 8 * (group / 2);
  return {column + group % 2 * target.ups, target.n - column};
}

// What y can take at once: 16 bytes of bf16, 8 of fp32.
inline bool TakesVectors(const LinearArgs& args, const LinearTarget& target) {
  const bool fp32 = OutputOf(args) == LinearOutput::kFp32;
  const int elements = fp32 ? 2 : 8;
  const int columns_of_ups = OutputOf(args) == LinearOutput::kSwiGlu ? 0 : target.ups;
  return reinterpret_cast<uintptr_t>(target.y) % (fp32 ? 8 : 16) == 0 &&
         target.ldy % elements == 0 && columns_of_ups % elements == 0;
}

struct TileOutput {
  LinearOutput kind = LinearOutput::kBf16;
  bool vectors = false;
  LinearTarget target;
};

// Lane q of 4 gives pair q of groups 0..3 and gets pairs 0..3 of group q.
__device__ __forceinline__ void TransposePairs(uint32_t (&pairs)[4]) {
  const bool odd = threadIdx.x & 1;
  const bool high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? pairs[i] : pairs[i + 1], 1);
    (odd ? pairs[i] : pairs[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? pairs[i] : pairs[i + 2], 2);
    (high ? pairs[i] : pairs[i + 2]) = got;
  }
}

__device__ __forceinline__ void StoreBf16Group(const TileOutput& out, int row, GroupColumns at,
                                               const uint32_t (&pairs)[4]) {
  if (row >= out.target.m) return;
  Bf16* y = static_cast<Bf16*>(out.target.y) + row * out.target.ldy + at.column;
  if (out.vectors && at.count >= 8) {
    *reinterpret_cast<uint4*>(y) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < at.count) y[i] = static_cast<Bf16>(pairs[i / 2] >> (16 * (i % 2)));
  }
}

__device__ __forceinline__ void StoreFloatPair(const TileOutput& out, int row, int column,
                                               int count, float first, float second) {
  if (row >= out.target.m) return;
  float* y = static_cast<float*>(out.target.y) + row * out.target.ldy + column;
  if (out.vectors && count >= 2) {
    *reinterpret_cast<float2*>(y) = make_float2(first, second);
    return;
  }
  if (count >= 1) y[0] = first;
  if (count >= 2) y[1] = second;
}

// Adds the bias of a group's two columns of this thread to its four sums.
__device__ __forceinline__ void AddBias(const TileOutput& out, int group, float (&sums)[4]) {
  const GroupColumns at = ColumnsOf(out.target, group);
  const int pair = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (pair + i >= at.count) continue;
    const float bias = out.target.bias[at.column + pair + i];
    sums[i] = contract::Add(sums[i], bias);
    sums[2 + i] = contract::Add(sums[2 + i], bias);
  }
}

template <int kValues>
__device__ __forceinline__ void GroupSums(const TileOutput& out, const float (&sums)[kValues],
                                          int i, int group, float (&values)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) values[e] = sums[4 * i + e];
  if (out.target.bias != nullptr) AddBias(out, group + i, values);
}

// Stores the first 4 G of `sums`. This thread's rows are `row` and row + 8; the fragment's first
// group is `group` (even where the weight is gated).
template <int kGroups, int kValues>
__device__ __forceinline__ void StoreSums(const TileOutput& out, const float (&sums)[kValues],
                                          int row, int group) {
  const int lane = threadIdx.x % 4;
  if (out.kind == LinearOutput::kFp32) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      float values[4];
      GroupSums(out, sums, i, group, values);
      const GroupColumns at = ColumnsOf(out.target, group + i);
      StoreFloatPair(out, row, at.column + 2 * lane, at.count - 2 * lane, values[0], values[1]);
      StoreFloatPair(out, row + 8, at.column + 2 * lane, at.count - 2 * lane, values[2], values[3]);
    }
  } else if (out.kind == LinearOutput::kBf16) {
#pragma unroll
    for (int i = 0; i < kGroups; i += 4) {
      uint32_t upper[4] = {}, lower[4] = {};
#pragma unroll
      for (int t = 0; t < 4 && i + t < kGroups; ++t) {
        float values[4];
        GroupSums(out, sums, i + t, group, values);
        upper[t] = PackBf16(values[0], values[1]);
        lower[t] = PackBf16(values[2], values[3]);
      }
      TransposePairs(upper);
      TransposePairs(lower);
      if (i + lane < kGroups) {
        const GroupColumns at = ColumnsOf(out.target, group + i + lane);
        StoreBf16Group(out, row, at, upper);
        StoreBf16Group(out, row + 8, at, lower);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kGroups / 2; i += 4) {
      Columns upper_gates = {}, upper_ups = {}, lower_gates = {}, lower_ups = {};
#pragma unroll
      for (int t = 0; t < 4 && i + t < kGroups / 2; ++t) {
        float gates[4], ups[4];
        GroupSums(out, sums, 2 * (i + t), group, gates);
        GroupSums(out, sums, 2 * (i + t) + 1, group, ups);
        upper_gates.pairs[t] = PackBf16(gates[0], gates[1]);
        lower_gates.pairs[t] = PackBf16(gates[2], gates[3]);
        upper_ups.pairs[t] = PackBf16(ups[0], ups[1]);
        lower_ups.pairs[t] = PackBf16(ups[2], ups[3]);
      }
      Columns upper = SwiGluColumns(upper_gates, upper_ups);
      Columns lower = SwiGluColumns(lower_gates, lower_ups);
      TransposePairs(upper.pairs);
      TransposePairs(lower.pairs);
      if (i + lane < kGroups / 2) {
        const GroupColumns at = ColumnsOf(out.target, group + 2 * (i + lane));
        StoreBf16Group(out, row, at, upper.pairs);
        StoreBf16Group(out, row + 8, at, lower.pairs);
      }
    }
  }
}

}  // namespace isobit::cuda::tile

#endif  // ISOBIT_KERNELS_CUDA_LINEAR_TILE_OUTPUT_CUH_
