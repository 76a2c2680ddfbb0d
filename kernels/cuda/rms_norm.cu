// RMSNorm, with the residual stream's update before it: one pass over memory, the row held in
// registers between the sum of squares and its use.
#include <algorithm>
#include <cstdint>
#include <type_traits>

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

__device__ __forceinline__ float FloatOf(float x) { return x; }
__device__ __forceinline__ float FloatOf(Bf16 x) { return contract::Bf16ToFloat(x); }

__device__ __forceinline__ void LoadSum(const float* x, float (&v)[kColumns]) { LoadFloats(x, v); }
__device__ __forceinline__ void LoadSum(const Bf16* x, float (&v)[kColumns]) {
  const Columns columns = LoadColumns(x);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    v[2 * i] = LowOf(columns.pairs[i]);
    v[2 * i + 1] = HighOf(columns.pairs[i]);
  }
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
// Sum: of the row-parallel result, float or Bf16; void: there is none.
template <typename Sum>
__global__ void __launch_bounds__(kMaxHidden / kColumns /
                                  (std::is_void_v<Sum> ? kVectorsOfRow : kVectorsOfSum))
    RmsNormKernel(const RmsNormArgs a, const Sum* a_sum) {
  constexpr bool kHasSum = !std::is_void_v<Sum>;
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
    if constexpr (kHasSum) LoadSum(a_sum + offset + v * kChunk, sum[v]);
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
template <typename Sum>
__global__ void __launch_bounds__(kRaggedThreads)
    RaggedRmsNormKernel(const RmsNormArgs a, const Sum* a_sum) {
  constexpr int kWarps = kRaggedThreads / kWarp;
  __shared__ float sums[kWarps];
  ReleaseSuccessor();
  WaitForPredecessor();
  const int thread = static_cast<int>(threadIdx.y) * kWarp + static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  Bf16* residual = a.residual + row * a.hidden;
  if (a_sum != nullptr) {
    const Sum* sum = a_sum + row * a.hidden;
    for (int64_t i = thread; i < a.hidden; i += kRaggedThreads) {
      residual[i] =
          contract::AddResidual(residual[i], FloatOf(sum[i]), a.bias == nullptr ? 0.0f : a.bias[i]);
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

template <typename Sum>
absl::Status LaunchWithSum(const RmsNormArgs& args, const Sum* sum, const Stream& stream) {
  const bool aligned = args.hidden % kColumns == 0 &&
                       Aligned16(args.residual, args.bias, args.weight, args.out) &&
                       Aligned16(static_cast<const void*>(sum));
  if (!aligned || args.hidden > kMaxHidden) {
    using RaggedSum = std::conditional_t<std::is_void_v<Sum>, float, Sum>;
    const Grid grid = {.blocks = dim3(static_cast<unsigned>(args.rows)),
                       .threads = dim3(kWarp, kRaggedThreads / kWarp)};
    return Launch(RaggedRmsNormKernel<RaggedSum>, grid, stream, args,
                  static_cast<const RaggedSum*>(sum));
  }
  constexpr unsigned kLeastWarps = 4;  // of a block
  const int64_t columns_of_warp = kChunk * (std::is_void_v<Sum> ? kVectorsOfRow : kVectorsOfSum);
  const auto warps = static_cast<unsigned>((args.hidden + columns_of_warp - 1) / columns_of_warp);
  const unsigned rows = std::max(1u, kLeastWarps / warps);
  const Grid grid = {.blocks = dim3(static_cast<unsigned>((args.rows + rows - 1) / rows)),
                     .threads = dim3(kWarp, warps, rows)};
  return Launch(RmsNormKernel<Sum>, grid, stream, args, sum);
}

}  // namespace

absl::Status LaunchRmsNorm(const RmsNormArgs& args, const Stream& stream) {
  return args.sum != nullptr ? LaunchWithSum(args, args.sum, stream)
                             : LaunchWithSum<void>(args, nullptr, stream);
}

absl::Status LaunchRmsNormOfBf16Sum(const RmsNormArgs& args, const Bf16* sum,
                                    const Stream& stream) {
  return LaunchWithSum(args, sum, stream);
}

}  // namespace isobit::cuda
