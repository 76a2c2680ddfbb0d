// The sum of squares of each row in float64 (C15). A warp adds up segments of 1,024 columns, the
// warps of a block one row or several.
#include <algorithm>
#include <cstdint>

#include "common/base/round_up.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/rows/leaf_tree.cuh"
#include "kernels/ops/optimizer.h"

namespace isobit::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;  // of a row
constexpr int kMinWarps = 8;   // of a block
constexpr int kLeaves = 8;     // of a lane
constexpr int kSegment = kWarp * kLeaves * contract::kNormLeaf;
constexpr int kThreads = 256;

__device__ __forceinline__ double Shuffled(double x, int bit) {
  return __shfl_xor_sync(0xffffffffu, x, bit);
}

// The tree over the segment's leaves, of which leaf i * 32 + l is lane l's number i; for every
// lane. In the first steps, lanes that are joined divide their sums between them, which halves the
// exchanges each time.
__device__ __forceinline__ double TreeOfSegment(double (&leaves)[kLeaves]) {
  const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int bit = 1, kept = kLeaves / 2; kept > 0; bit *= 2, kept /= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < kLeaves / 2; ++i) {
      if (i >= kept) continue;
      const double other = Shuffled(upper ? leaves[i] : leaves[i + kept], bit);
      leaves[i] = contract::Add(upper ? leaves[i + kept] : leaves[i], other);
    }
  }
  // Lane l now has the leaves of number 4 * bit 0 of l + 2 * bit 1 + bit 2, of an eighth of the
  // lanes. First the rest of the lanes, then the numbers.
  double sum = leaves[0];
  for (const int bit : {8, 16, 4, 2, 1}) sum = contract::Add(sum, Shuffled(sum, bit));
  return sum;
}

// kVector: rows are whole and aligned in leaves.
template <bool kVector>
__device__ __forceinline__ double LeafAt(const float* row, int64_t column, int64_t columns) {
  float x[contract::kNormLeaf] = {};
  if constexpr (kVector) {
    if (column < columns) {
      const float4 v = *reinterpret_cast<const float4*>(row + column);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < contract::kNormLeaf; ++i) {
      if (column + i < columns) x[i] = row[column + i];
    }
  }
  return contract::SquareLeaf(x);
}

// blockDim: (32 lanes, warps of a row, rows). A row of more segments than warps takes several
// turns.
template <bool kVector>
__global__ void __launch_bounds__(kWarp* kMaxWarps) SquareSumsKernel(const SquareSumsArgs a) {
  __shared__ double of_segments[kMaxWarps];
  ReleaseSuccessor();
  WaitForPredecessor();
  const int lane = static_cast<int>(threadIdx.x);
  const int warp = static_cast<int>(threadIdx.y);
  const int warps = static_cast<int>(blockDim.y);
  const int64_t row = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  const float* x = a.x + row * a.columns;
  double* const sums = of_segments + threadIdx.z * blockDim.y;
  const int64_t turn = int64_t{warps} * kSegment;
  contract::TreeSum64 turns;
  double total = 0.0;
  for (int64_t begin = 0; begin < a.columns; begin += turn) {
    const int64_t first = begin + warp * kSegment + lane * contract::kNormLeaf;
    double leaves[kLeaves] = {};
    if (row < a.rows) {
#pragma unroll
      for (int i = 0; i < kLeaves; ++i) {
        leaves[i] = LeafAt<kVector>(x, first + i * kWarp * contract::kNormLeaf, a.columns);
      }
    }
    total = TreeOfSegment(leaves);
    if (warps > 1) {
      __syncthreads();
      if (lane == 0) sums[warp] = total;
      __syncthreads();
      total = lane < warps ? sums[lane] : 0.0;
#pragma unroll
      for (int bit = 1; bit < kWarp; bit *= 2) total = contract::Add(total, Shuffled(total, bit));
    }
    if (a.columns > turn) turns.Push(total);
  }
  if (a.columns > turn) total = turns.Total();
  if (warp == 0 && lane == 0 && row < a.rows) a.sums[row] = total;
}

// Rows of one leaf: a thread has a row.
__global__ void __launch_bounds__(kThreads) LeafSquaresKernel(const SquareSumsArgs a) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row < a.rows) a.sums[row] = LeafAt<false>(a.x + row * a.columns, 0, a.columns);
}

}  // namespace

absl::Status Run(const SquareSumsArgs& args, const Stream& stream) {
  if (args.columns <= contract::kNormLeaf) {
    const auto blocks = static_cast<unsigned>(CeilDiv(args.rows, int64_t{kThreads}));
    return Launch(LeafSquaresKernel, {.blocks = dim3(blocks), .threads = dim3(kThreads)}, stream,
                  args);
  }
  const bool vector = args.columns % contract::kNormLeaf == 0 && Aligned16(args.x);
  const auto warps =
      static_cast<unsigned>(std::min<int64_t>(CeilDiv(args.columns, int64_t{kSegment}), kMaxWarps));
  const unsigned rows = std::max(1u, kMinWarps / warps);
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(CeilDiv(args.rows, int64_t{rows}))),
                     .threads = dim3(kWarp, warps, rows)};
  return Launch(vector ? SquareSumsKernel<true> : SquareSumsKernel<false>, grid, stream, args);
}

}  // namespace isobit::cuda
