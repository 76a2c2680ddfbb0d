// RMSNorm, with the residual stream's update before it: one pass over memory, the row held in
// registers between the sum of squares and its use.
#include <algorithm>
#include <cstdint>

#include "kernels/contract/row_functions.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/row_columns.cuh"
#include "kernels/cuda/row_kernels.h"

namespace isobit::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;             // of a row
constexpr int kChunk = kWarp * kColumns;  // columns that a warp loads at once
constexpr int kMaxHidden = 16384;         // of the kernel that holds a row in registers
constexpr int kRaggedThreads = 256;

// Chunks of a warp: enough bytes in flight, of which a sum in fp32 brings twice the row's.
constexpr int kVectorsOfRow = 4;
constexpr int kVectorsOfSum = 2;

// The tree over a row's warps, in ascending order, padded with +0. Every thread of the row gets it.
__device__ __forceinline__ float TreeOfWarps(float sum, int warp, int num_warps, float* sums) {
  if (threadIdx.x == 0) sums[warp] = sum;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x);
  return TreeOfLanes(lane < num_warps ? sums[lane] : 0.0f);
}

// contract::AddResidual of each column. `bias` may be null.
__device__ __forceinline__ Columns AddResidualColumns(const Columns& residual,
                                                      const float (&sum)[kColumns],
                                                      const float* bias) {
  float b[kColumns] = {};
  if (bias != nullptr) LoadFloats(bias, b);
  Columns out;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const uint32_t delta =
        PackBf16(contract::Add(sum[2 * i], b[2 * i]), contract::Add(sum[2 * i + 1], b[2 * i + 1]));
    out.pairs[i] = PackBf16(contract::Add(LowOf(residual.pairs[i]), LowOf(delta)),
                            contract::Add(HighOf(residual.pairs[i]), HighOf(delta)));
  }
  return out;
}

// blockDim: (32 lanes, warps of a row, rows). A warp holds kVectors chunks of 256 columns that lie
// side by side, so that its sum is one aligned subtree of the row's.
template <bool kHasSum>
__global__ void __launch_bounds__(kMaxHidden / kColumns / (kHasSum ? kVectorsOfSum : kVectorsOfRow))
    RmsNormKernel(const RmsNormArgs a) {
  constexpr int kVectors = kHasSum ? kVectorsOfSum : kVectorsOfRow;
  __shared__ float sums[kMaxWarps];
  ReleaseSuccessor();
  const int hidden = static_cast<int>(a.hidden);
  const int first =
      static_cast<int>(threadIdx.y) * kVectors * kChunk + static_cast<int>(threadIdx.x) * kColumns;
  Columns weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * kChunk;
    if (column < hidden) weight[v] = LoadColumns(a.weight + column);
  }
  WaitForPredecessor();

  const int64_t row = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  const bool inside = row < a.rows;
  const int64_t offset = row * a.hidden + first;
  Columns x[kVectors] = {};
  float sum[kVectors][kColumns];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!inside || first + v * kChunk >= hidden) continue;
    x[v] = LoadColumns(a.residual + offset + v * kChunk);
    if constexpr (kHasSum) LoadFloats(a.sum + offset + v * kChunk, sum[v]);
  }
  if constexpr (kHasSum) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * kChunk;
      if (!inside || column >= hidden) continue;
      x[v] = AddResidualColumns(x[v], sum[v], a.bias == nullptr ? nullptr : a.bias + column);
      StoreColumns(a.residual + offset + v * kChunk, x[v]);
    }
  }

  float squares[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) squares[v] = TreeOfLanes(SumOfSquares(x[v]));
#pragma unroll
  for (int width = kVectors / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) squares[i] = contract::Add(squares[2 * i], squares[2 * i + 1]);
  }
  float total = squares[0];
  if (blockDim.y > 1) {
    const int warp = static_cast<int>(threadIdx.y);
    const int warps = static_cast<int>(blockDim.y);
    total = TreeOfWarps(total, warp, warps, sums + static_cast<int>(threadIdx.z) * warps);
  }
  const float inverse = contract::InverseRms(total, a.hidden, a.eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!inside || first + v * kChunk >= hidden) continue;
    StoreColumns(a.out + offset + v * kChunk, NormaliseColumns(x[v], inverse, weight[v]));
  }
}

// Any width and alignment: one block a row, a leaf a thread, segment after segment.
__global__ void __launch_bounds__(kRaggedThreads) RaggedRmsNormKernel(const RmsNormArgs a) {
  constexpr int kWarps = kRaggedThreads / kWarp;
  __shared__ float sums[kWarps];
  ReleaseSuccessor();
  WaitForPredecessor();
  const int thread = static_cast<int>(threadIdx.y) * kWarp + static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  Bf16* residual = a.residual + row * a.hidden;
  if (a.sum != nullptr) {
    const float* sum = a.sum + row * a.hidden;
    for (int64_t i = thread; i < a.hidden; i += kRaggedThreads) {
      residual[i] =
          contract::AddResidual(residual[i], sum[i], a.bias == nullptr ? 0.0f : a.bias[i]);
    }
    __syncthreads();
  }
  contract::TreeSum tree;
  for (int64_t begin = 0; begin < a.hidden; begin += kRaggedThreads * contract::kNormLeaf) {
    const int64_t first = begin + thread * contract::kNormLeaf;
    const int64_t left = min(a.hidden - first, int64_t{contract::kNormLeaf});
    const float leaf = left > 0 ? contract::SumOfSquares(residual + first, left) : 0.0f;
    tree.Push(TreeOfWarps(TreeOfLanes(leaf), static_cast<int>(threadIdx.y), kWarps, sums));
    __syncthreads();
  }
  const float inverse = contract::InverseRms(tree.Total(), a.hidden, a.eps);
  Bf16* out = a.out + row * a.hidden;
  for (int64_t i = thread; i < a.hidden; i += kRaggedThreads) {
    out[i] = contract::Normalise(residual[i], inverse, a.weight[i]);
  }
}

}  // namespace

absl::Status LaunchRmsNorm(const RmsNormArgs& args, const Stream& stream) {
  const bool aligned = args.hidden % kColumns == 0 &&
                       Aligned16(args.residual, args.sum, args.bias, args.weight, args.out);
  if (!aligned || args.hidden > kMaxHidden) {
    const Grid grid = {.blocks = dim3(static_cast<unsigned>(args.rows)),
                       .threads = dim3(kWarp, kRaggedThreads / kWarp)};
    return Launch(RaggedRmsNormKernel, grid, stream, args);
  }
  constexpr unsigned kLeastWarps = 4;  // of a block
  const bool has_sum = args.sum != nullptr;
  const int64_t columns_of_warp = kChunk * (has_sum ? kVectorsOfSum : kVectorsOfRow);
  const auto warps = static_cast<unsigned>((args.hidden + columns_of_warp - 1) / columns_of_warp);
  const unsigned rows = std::max(1u, kLeastWarps / warps);
  const Grid grid = {.blocks = dim3(static_cast<unsigned>((args.rows + rows - 1) / rows)),
                     .threads = dim3(kWarp, warps, rows)};
  return has_sum ? Launch(RmsNormKernel<true>, grid, stream, args)
                 : Launch(RmsNormKernel<false>, grid, stream, args);
}

}  // namespace isobit::cuda
