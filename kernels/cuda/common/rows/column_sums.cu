// Column sums of a bf16 matrix: a bias's gradient (C11).
#include <cstdint>

#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/row_columns.cuh"
#include "kernels/cuda/common/rows/block_sums.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRowsAtOnce = 4;
constexpr int kBlocksPerSm = 12;

// blockIdx.y: the block of rows. A thread has eight columns.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    ColumnSumsKernel(const Bf16* x, int64_t ldx, const __grid_constant__ PackBlocks blocks,
                     const BlockSums sums) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t column = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kColumns;
  if (column >= sums.columns) return;
  const RowBlock rows = RowsOfBlock(blocks, static_cast<int>(blockIdx.y));
  const Bf16* from = x + rows.first * ldx + column;
  float sum[kColumns] = {};
  for (int r = 0; r < rows.rows; r += kRowsAtOnce) {
    Columns v[kRowsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (r + i < rows.rows) v[i] = LoadColumns(from + (r + i) * ldx);
    }
    // A sum that began with +0 is never -0, so the +0 of rows beyond the block change nothing.
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
      for (int pair = 0; pair < kColumns / 2; ++pair) {
        sum[2 * pair] = contract::Add(sum[2 * pair], LowOf(v[i].pairs[pair]));
        sum[2 * pair + 1] = contract::Add(sum[2 * pair + 1], HighOf(v[i].pairs[pair]));
      }
    }
  }
  StoreFloats(sums.of_blocks + blockIdx.y * sums.columns + column, sum);
}

// Any width and alignment.
__global__ void __launch_bounds__(kThreads)
    RaggedColumnSumsKernel(const Bf16* x, int64_t ldx, const __grid_constant__ PackBlocks blocks,
                           const BlockSums sums) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= sums.columns) return;
  const RowBlock rows = RowsOfBlock(blocks, static_cast<int>(blockIdx.y));
  float sum = 0.0f;
  for (int r = 0; r < rows.rows; ++r) {
    sum = contract::Add(sum, contract::Bf16ToFloat(x[(rows.first + r) * ldx + column]));
  }
  sums.of_blocks[blockIdx.y * sums.columns + column] = sum;
}

}  // namespace

absl::Status Run(const ColumnSumsArgs& args, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const PackBlocks blocks, CutIntoBlocks(args.packs));
  ISOBIT_ASSIGN_OR_RETURN(std::byte* const workspace,
                          ScratchOf(stream, BlockSumsBytes(args.packs, args.columns)));
  const BlockSums sums(workspace, blocks, args.columns);
  const bool aligned =
      args.columns % kColumns == 0 && args.ldx % kColumns == 0 && Aligned16(args.x, workspace);
  const int64_t columns_of_block = int64_t{kThreads} * (aligned ? kColumns : 1);
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(CeilDiv(args.columns, columns_of_block)),
                                    static_cast<unsigned>(blocks.count())),
                     .threads = dim3(kThreads)};
  ISOBIT_RETURN_IF_ERROR(Launch(aligned ? ColumnSumsKernel : RaggedColumnSumsKernel, grid, stream,
                                args.x, args.ldx, blocks, sums));
  return LaunchSumBlocks(sums, blocks, {.out = args.out, .width = args.columns}, {}, stream);
}

}  // namespace isobit::cuda
