// The gradient of RMSNorm (C12), in one pass over x and dy: a thread block has the rows of one
// block of column sums. While dx is computed, each thread adds up its columns' terms of dw.
#include <algorithm>
#include <cstdint>

#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/row_columns.cuh"
#include "kernels/cuda/common/rows/block_sums.h"
#include "kernels/cuda/common/rows/leaf_tree.cuh"
#include "kernels/cuda/common/rows/norm_gradient.cuh"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 16;
constexpr int kChunk = kWarp * kColumns;  // columns that a warp loads at once
constexpr int kRaggedThreads = 256;
constexpr int kRaggedWarps = kRaggedThreads / kWarp;

// kVectors chunks of kRows rows, as one warp holds them.
template <int kVectors, int kRows>
struct Loaded {
  Columns x[kRows][kVectors];
  Columns dy[kRows][kVectors];

  // Rows from `row` on that lie before `end`; +0 beyond. `first`: this lane's first column.
  __device__ __forceinline__ void Load(const RmsNormGradientArgs& a, int64_t row, int64_t end,
                                       int first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int column = first + v * kChunk;
        x[r][v] = {};
        dy[r][v] = {};
        if (row + r >= end || column >= static_cast<int>(a.columns)) continue;
        x[r][v] = LoadColumns(a.x + (row + r) * a.columns + column);
        dy[r][v] = LoadColumns(a.dy + (row + r) * a.columns + column);
      }
    }
  }
};

// Sums over rows, for every thread of the block. sums: one number for each warp's vector.
template <int kVectors, int kRows>
__device__ __forceinline__ void TreesOfRows(float (&of_vectors)[kRows][kVectors], int leaves,
                                            float (&sums)[kRows][kWarp], float (&totals)[kRows]) {
  static_assert(kMaxWarps * 2 <= kWarp);
  const int lane = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(threadIdx.y) * kVectors;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float sum = TreeOfLeaves(of_vectors[r][v], kLeavesOfLane, leaves);
      if (lane == 0) sums[r][first + v] = sum;
    }
  }
  __syncthreads();
  const int vectors = static_cast<int>(blockDim.y) * kVectors;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = lane < vectors ? sums[r][lane] : 0.0f;
    totals[r] = OfLane0(TreeOfLeaves(sum, kChunk / contract::kNormLeaf, leaves));
  }
}

// blockDim: (32 lanes, warps of a row). A warp holds kVectors chunks of 256 columns that lie side
// by side. While kRows rows are computed, the next ones are loaded.
template <int kVectors, int kRows>
__global__ void __launch_bounds__(kWarp* kMaxWarps)
    RmsNormGradientKernel(const RmsNormGradientArgs a, const __grid_constant__ PackBlocks blocks,
                          const BlockSums sums, int leaves) {
  // Squares are not written again before every thread has read the dots, and the other way round.
  __shared__ float squares[kRows][kWarp];
  __shared__ float dots[kRows][kWarp];
  ReleaseSuccessor();
  WaitForPredecessor();
  const int columns = static_cast<int>(a.columns);
  const int first =
      static_cast<int>(threadIdx.y) * kVectors * kChunk + static_cast<int>(threadIdx.x) * kColumns;
  Columns weight[kVectors] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (first + v * kChunk < columns) weight[v] = LoadColumns(a.weight + first + v * kChunk);
  }
  const RowBlock rows = RowsOfBlock(blocks, static_cast<int>(blockIdx.x));
  const int64_t end = rows.first + rows.rows;
  float dw[kVectors][kColumns] = {};
  Loaded<kVectors, kRows> now;
  now.Load(a, rows.first, end, first);
#pragma unroll 1
  for (int64_t row = rows.first; row < end; row += kRows) {
    Loaded<kVectors, kRows> next;
    next.Load(a, row + kRows, end, first);
    float parts[kRows][kVectors];
    float inverse[kRows];
    float mean[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) parts[r][v] = SumOfSquares(now.x[r][v]);
    }
    TreesOfRows<kVectors, kRows>(parts, leaves, squares, inverse);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      inverse[r] = contract::InverseRms(inverse[r], a.columns, a.eps);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        // Lanes beyond the row hold +0, and their part must be +0 also where `inverse` is infinite.
        const bool inside = first + v * kChunk < columns;
        parts[r][v] =
            inside ? DotOfColumns(now.x[r][v], now.dy[r][v], weight[v], inverse[r]) : 0.0f;
      }
    }
    TreesOfRows<kVectors, kRows>(parts, leaves, dots, mean);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= end) continue;
      mean[r] = contract::Div(mean[r], static_cast<float>(a.columns));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int column = first + v * kChunk;
        if (column >= columns) continue;
        StoreColumns(
            a.dx + (row + r) * a.columns + column,
            NormGradientOfColumns(now.x[r][v], now.dy[r][v], weight[v], inverse[r], mean[r]));
        AddWeightTerms(now.x[r][v], now.dy[r][v], inverse[r], dw[v]);
      }
    }
    now = next;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * kChunk;
    if (column < columns) StoreFloats(sums.of_blocks + blockIdx.x * sums.columns + column, dw[v]);
  }
}

// ---- Any width and alignment: one block takes a row, segment by segment, and a thread one leaf of
// each

// The tree over the leaves of a row, for every thread; leaf(i, n) is that of columns i .. i+n-1.
template <typename Leaf>
__device__ float TreeOfBlock(int64_t columns, float (&sums)[kRaggedWarps], Leaf leaf) {
  constexpr int kSegment = kRaggedThreads * contract::kNormLeaf;
  const int lane = static_cast<int>(threadIdx.x);
  const int thread = static_cast<int>(threadIdx.y) * kWarp + lane;
  const auto leaves =
      static_cast<int>(PaddedLeaves((columns + contract::kNormLeaf - 1) / contract::kNormLeaf));
  contract::TreeSum tree;
  for (int64_t begin = 0; begin < columns; begin += kSegment) {
    const int64_t first = begin + thread * contract::kNormLeaf;
    const auto left = static_cast<int>(min(columns - first, int64_t{contract::kNormLeaf}));
    const float sum = TreeOfLeaves(left > 0 ? leaf(first, left) : 0.0f, 1, leaves);
    __syncthreads();
    if (lane == 0) sums[threadIdx.y] = sum;
    __syncthreads();
    tree.Push(OfLane0(TreeOfLeaves(lane < kRaggedWarps ? sums[lane] : 0.0f, kWarp, leaves)));
  }
  return tree.Total();
}

__global__ void __launch_bounds__(kRaggedThreads)
    RaggedRmsNormGradientKernel(const RmsNormGradientArgs a,
                                const __grid_constant__ PackBlocks blocks, const BlockSums sums) {
  __shared__ float warps[kRaggedWarps];
  ReleaseSuccessor();
  WaitForPredecessor();
  const int thread = static_cast<int>(threadIdx.y) * kWarp + static_cast<int>(threadIdx.x);
  const RowBlock rows = RowsOfBlock(blocks, static_cast<int>(blockIdx.x));
  float* dw = sums.of_blocks + blockIdx.x * sums.columns;
  for (int64_t c = thread; c < a.columns; c += kRaggedThreads) dw[c] = 0.0f;
  for (int64_t row = rows.first; row < rows.first + rows.rows; ++row) {
    const Bf16* x = a.x + row * a.columns;
    const Bf16* dy = a.dy + row * a.columns;
    const float squares = TreeOfBlock(a.columns, warps, [&](int64_t first, int n) {
      return contract::SumOfSquares(x + first, n);
    });
    const float inverse = contract::InverseRms(squares, a.columns, a.eps);
    const auto h = [&](int64_t c) { return contract::Mul(contract::Bf16ToFloat(x[c]), inverse); };
    const auto g = [&](int64_t c) {
      return contract::Mul(contract::Bf16ToFloat(dy[c]), contract::Bf16ToFloat(a.weight[c]));
    };
    const float dot = TreeOfBlock(a.columns, warps, [&](int64_t first, int n) {
      float hs[contract::kNormLeaf] = {};
      float gs[contract::kNormLeaf] = {};
#pragma unroll
      for (int i = 0; i < contract::kNormLeaf; ++i) {
        if (i >= n) continue;
        hs[i] = h(first + i);
        gs[i] = g(first + i);
      }
      return contract::DotLeaf(gs, hs);
    });
    const float mean = contract::Div(dot, static_cast<float>(a.columns));
    for (int64_t c = thread; c < a.columns; c += kRaggedThreads) {
      a.dx[row * a.columns + c] = contract::NormGradient(h(c), g(c), mean, inverse);
      dw[c] = contract::Add(dw[c], contract::NormWeightTerm(dy[c], x[c], inverse));
    }
  }
}

template <int kVectors, int kRows>
absl::Status LaunchRows(const RmsNormGradientArgs& args, const PackBlocks& blocks,
                        const BlockSums& sums, const Stream& stream) {
  const auto warps = static_cast<unsigned>(CeilDiv(args.columns, int64_t{kChunk} * kVectors));
  const auto leaves =
      static_cast<int>(PaddedLeaves(CeilDiv(args.columns, int64_t{contract::kNormLeaf})));
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(blocks.count())),
                     .threads = dim3(kWarp, warps)};
  return Launch(RmsNormGradientKernel<kVectors, kRows>, grid, stream, args, blocks, sums, leaves);
}

}  // namespace

absl::Status Run(const RmsNormGradientArgs& args, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const PackBlocks blocks, CutIntoBlocks(args.packs));
  ISOBIT_ASSIGN_OR_RETURN(std::byte* const workspace,
                          ScratchOf(stream, BlockSumsBytes(args.packs, args.columns)));
  const BlockSums sums(workspace, blocks, args.columns);
  const bool aligned =
      args.columns % kColumns == 0 && Aligned16(args.x, args.weight, args.dy, args.dx, workspace);
  if (aligned && args.columns <= kMaxWarps * kChunk / 2) {
    ISOBIT_RETURN_IF_ERROR((LaunchRows<1, 4>(args, blocks, sums, stream)));
  } else if (aligned && args.columns <= 2 * kMaxWarps * kChunk) {
    ISOBIT_RETURN_IF_ERROR((LaunchRows<2, 2>(args, blocks, sums, stream)));
  } else {
    const Grid grid = {.blocks = dim3(static_cast<unsigned>(blocks.count())),
                       .threads = dim3(kWarp, kRaggedWarps)};
    ISOBIT_RETURN_IF_ERROR(Launch(RaggedRmsNormGradientKernel, grid, stream, args, blocks, sums));
  }
  return LaunchSumBlocks(sums, blocks, {.out = args.dw, .width = args.columns}, {}, stream);
}

}  // namespace isobit::cuda
