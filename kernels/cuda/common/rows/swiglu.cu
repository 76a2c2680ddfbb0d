// SwiGLU of a gate_up matrix, where the linear layer has not fused it.
#include <cstdint>

#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/row_columns.cuh"
#include "kernels/cuda/common/device/swiglu.cuh"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/cuda/common/rows/tiles.h"
#include "kernels/ops/swiglu.h"

namespace isobit::cuda {
namespace {

constexpr int kWordsOfThread = 2;

__global__ void __launch_bounds__(kMaxTileThreads)
    SwiGluKernel(const SwiGluArgs a, unsigned tiles) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const RowTile tile = TileOfBlock(tiles, kWordsOfThread);
  if (tile.row >= a.rows) return;
  const Bf16* gates = a.gate_up + tile.row * 2 * a.columns;
  Bf16* out = a.out + tile.row * a.columns;
  // A thread beyond the row computes its last word again: without a branch, all loads start at
  // once.
  int columns[kWordsOfThread];
  Columns gate[kWordsOfThread];
  Columns up[kWordsOfThread];
#pragma unroll
  for (int i = 0; i < kWordsOfThread; ++i) {
    const auto last = static_cast<int>(a.columns) - kColumns;
    columns[i] = min((tile.first + i * tile.step) * kColumns, last);
    gate[i] = LoadColumns(gates + columns[i]);
    up[i] = LoadColumns(gates + a.columns + columns[i]);
  }
#pragma unroll
  for (int i = 0; i < kWordsOfThread; ++i) {
    StoreColumns(out + columns[i], SwiGluColumns(gate[i], up[i]));
  }
}

// Any width and alignment: one column for each thread.
__global__ void __launch_bounds__(kMaxTileThreads)
    RaggedSwiGluKernel(const SwiGluArgs a, unsigned tiles) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const RowTile tile = TileOfBlock(tiles, 1);
  if (tile.row >= a.rows || tile.first >= a.columns) return;
  const Bf16* gate = a.gate_up + tile.row * 2 * a.columns + tile.first;
  a.out[tile.row * a.columns + tile.first] = contract::SwiGlu(gate[0], gate[a.columns]);
}

}  // namespace

absl::Status Run(const SwiGluArgs& args, const Stream& stream) {
  const bool aligned = args.columns % kColumns == 0 && Aligned16(args.gate_up, args.out);
  unsigned tiles = 0;
  if (!aligned) {
    const Grid grid = TileRows(args.rows, args.columns, 1, &tiles);
    return Launch(RaggedSwiGluKernel, grid, stream, args, tiles);
  }
  const Grid grid = TileRows(args.rows, args.columns / kColumns, kWordsOfThread, &tiles);
  return Launch(SwiGluKernel, grid, stream, args, tiles);
}

}  // namespace isobit::cuda
