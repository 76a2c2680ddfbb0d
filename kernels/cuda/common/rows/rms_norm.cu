// RMSNorm, with the residual stream's update before it: one pass over memory, with the row in
// registers between the sum of squares and its use.
#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/row_columns.cuh"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;             // of a row
constexpr int kChunk = kWarp * kColumns;  // columns that a warp loads at once
constexpr int kMaxHidden = 16384;         // of the kernel that holds a row in registers
constexpr int kRaggedThreads = 256;

// The tree over a row's warps, in ascending order, padded with +0. Every thread of the row gets it.
__device__ __forceinline__ float TreeOfWarps(float sum, int warp, int num_warps, float* sums) {
  if (threadIdx.x == 0) sums[warp] = sum;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x);
  return TreeOfLanes(lane < num_warps ? sums[lane] : 0.0f);
}

// ---- What is added to the residual: [rows, hidden] each. kVectors: chunks of a warp, as many as
// it takes to have enough bytes in flight.

struct NoSum {
  static constexpr int kVectors = 4;
  static constexpr bool kIsSum = false;
  bool aligned() const { return true; }
  __device__ float At(int64_t /*i*/) const { return 0.0f; }
};

struct FloatSum {
  static constexpr int kVectors = 2;
  static constexpr bool kIsSum = true;
  const float* sum;
  bool aligned() const { return Aligned16(sum); }
  __device__ float At(int64_t i) const { return sum[i]; }
  __device__ __forceinline__ void Load(int64_t i, float (&v)[kColumns]) const {
    LoadFloats(sum + i, v);
  }
};

struct Bf16Sum {
  static constexpr int kVectors = 2;
  static constexpr bool kIsSum = true;
  const Bf16* sum;
  bool aligned() const { return Aligned16(sum); }
  __device__ float At(int64_t i) const { return contract::Bf16ToFloat(sum[i]); }
  __device__ __forceinline__ void Load(int64_t i, float (&v)[kColumns]) const {
    const Columns columns = LoadColumns(sum + i);
#pragma unroll
    for (int pair = 0; pair < kColumns / 2; ++pair) {
      v[2 * pair] = LowOf(columns.pairs[pair]);
      v[2 * pair + 1] = HighOf(columns.pairs[pair]);
    }
  }
};

// The tree over the ranks' partial sums (C4).
template <int kRanks>
struct RankSum {
  static constexpr int kVectors = 1;
  static constexpr bool kIsSum = true;
  const float* of_rank[kRanks];
  bool aligned() const {
    return std::all_of(of_rank, of_rank + kRanks, [](const float* p) { return Aligned16(p); });
  }
  __device__ float At(int64_t i) const {
    float values[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) values[r] = of_rank[r][i];
    return contract::TreeOf(values, kRanks);
  }
  __device__ __forceinline__ void Load(int64_t i, float (&v)[kColumns]) const {
    float values[kRanks][kColumns];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) LoadFloats(of_rank[r] + i, values[r]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float column[kRanks];
#pragma unroll
      for (int r = 0; r < kRanks; ++r) column[r] = values[r][c];
      v[c] = contract::TreeOf(column, kRanks);
    }
  }
};

// ---- Kernels

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

// Columns of a row that the kernel below can hold.
template <typename Sum>
constexpr int kMostColumns = std::min(kMaxHidden, kMaxWarps* kChunk* Sum::kVectors);

// blockDim: (32 lanes, warps of a row, rows). A warp holds kVectors chunks of 256 columns that lie
// side by side, so that its sum is one aligned subtree of the row's.
template <typename Sum>
__global__ void __launch_bounds__(kMostColumns<Sum> / kColumns / Sum::kVectors)
    RmsNormKernel(const RmsNormArgs a, const __grid_constant__ Sum joins) {
  constexpr int kVectors = Sum::kVectors;
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
    if constexpr (Sum::kIsSum) joins.Load(offset + v * kChunk, sum[v]);
  }
  if constexpr (Sum::kIsSum) {
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

// Any width and alignment: one block takes a row, segment by segment, and a thread one leaf of
// each.
template <typename Sum>
__global__ void __launch_bounds__(kRaggedThreads)
    RaggedRmsNormKernel(const RmsNormArgs a, const __grid_constant__ Sum joins) {
  constexpr int kWarps = kRaggedThreads / kWarp;
  __shared__ float sums[kWarps];
  ReleaseSuccessor();
  WaitForPredecessor();
  const int thread = static_cast<int>(threadIdx.y) * kWarp + static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  Bf16* residual = a.residual + row * a.hidden;
  if (Sum::kIsSum) {
    for (int64_t i = thread; i < a.hidden; i += kRaggedThreads) {
      residual[i] = contract::AddResidual(residual[i], joins.At(row * a.hidden + i),
                                          a.bias == nullptr ? 0.0f : a.bias[i]);
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
absl::Status LaunchWithSum(const RmsNormArgs& args, const Sum& sum, const Stream& stream) {
  const bool aligned = args.hidden % kColumns == 0 && sum.aligned() &&
                       Aligned16(args.residual, args.bias, args.weight, args.out);
  if (!aligned || args.hidden > kMostColumns<Sum>) {
    const Grid grid = {.blocks = dim3(static_cast<unsigned>(args.rows)),
                       .threads = dim3(kWarp, kRaggedThreads / kWarp)};
    return Launch(RaggedRmsNormKernel<Sum>, grid, stream, args, sum);
  }
  constexpr unsigned kLeastWarps = 4;  // of a block
  constexpr int64_t columns_of_warp = kChunk * Sum::kVectors;
  const auto warps = static_cast<unsigned>(CeilDiv(args.hidden, columns_of_warp));
  const unsigned rows = std::max(1u, kLeastWarps / warps);
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(CeilDiv(args.rows, rows))),
                     .threads = dim3(kWarp, warps, rows)};
  return Launch(RmsNormKernel<Sum>, grid, stream, args, sum);
}

}  // namespace

absl::Status Run(const RmsNormArgs& args, const Stream& stream) {
  return args.sum != nullptr ? LaunchWithSum(args, FloatSum{args.sum}, stream)
                             : LaunchWithSum(args, NoSum{}, stream);
}

absl::Status LaunchRmsNormOfBf16Sum(const RmsNormArgs& args, const Bf16* sum,
                                    const Stream& stream) {
  return LaunchWithSum(args, Bf16Sum{sum}, stream);
}

absl::Status LaunchRmsNormOfPartials(const RmsNormArgs& args, const float* const* partials,
                                     int num_ranks, const Stream& stream) {
  const auto launch = [&]<int kRanks>(RankSum<kRanks> sum) {
    std::copy_n(partials, kRanks, sum.of_rank);
    return LaunchWithSum(args, sum, stream);
  };
  switch (num_ranks) {
    case 2:
      return launch(RankSum<2>());
    case 4:
      return launch(RankSum<4>());
    case 8:
      return launch(RankSum<8>());
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("RMSNorm of a sum over ranks: expected 2, 4 or 8 ranks, got ", num_ranks));
  }
}

}  // namespace isobit::cuda
