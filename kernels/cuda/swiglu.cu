// SwiGLU of a gate_up matrix, where the linear layer did not fuse it.
#include <cstdint>

#include "kernels/contract/row_functions.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/row_columns.cuh"
#include "kernels/cuda/device/swiglu.cuh"
#include "kernels/cuda/row_kernels.h"
#include "kernels/cuda/row_tiles.h"

namespace isobit::cuda {
namespace {

constexpr int kWordsOfThread = 2;

__global__ void __launch_bounds__(kMaxTileThreads)
    SwiGluKernel(const SwiGluArgs a, unsigned tiles) {
  WaitForPredecessor();
  ReleaseSuccessor();
  const RowTile tile = TileOfBlock(tiles, kWordsOfThread);
  const Bf16* gates = a.gate_up + tile.row * 2 * a.columns;
  Bf16* out = a.out + tile.row * a.columns;
  Columns gate[kWordsOfThread];
  Columns up[kWordsOfThread];
#pragma unroll
  for (int i = 0; i < kWordsOfThread; ++i) {
    const int column = (tile.first + i * tile.step) * kColumns;
    if (column >= a.columns) continue;
    gate[i] = LoadColumns(gates + column);
    up[i] = LoadColumns(gates + a.columns + column);
  }
#pragma unroll
  for (int i = 0; i < kWordsOfThread; ++i) {
    const int column = (tile.first + i * tile.step) * kColumns;
    if (column >= a.columns) continue;
    StoreColumns(out + column, SwiGluColumns(gate[i], up[i]));
  }
}

// Any width and alignment: a column a word.
__global__ void __launch_bounds__(kMaxTileThreads)
    RaggedSwiGluKernel(const SwiGluArgs a, unsigned tiles) {
  WaitForPredecessor();
  ReleaseSuccessor();
  const RowTile tile = TileOfBlock(tiles, 1);
  if (tile.first >= a.columns) return;
  const Bf16* gate = a.gate_up + tile.row * 2 * a.columns + tile.first;
  a.out[tile.row * a.columns + tile.first] = contract::SwiGlu(gate[0], gate[a.columns]);
}

}  // namespace

absl::Status LaunchSwiGlu(const SwiGluArgs& args, const Stream& stream) {
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
