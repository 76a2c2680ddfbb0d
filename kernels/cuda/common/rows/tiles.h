// How an elementwise op over a matrix becomes a grid: every block takes one tile of a row, or
// several narrow rows. The tiles of a row have the same size, so that few threads are idle if the
// width is not a power of two.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_ROWS_TILES_H_
#define ISOBIT_KERNELS_CUDA_COMMON_ROWS_TILES_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/base/round_up.h"
#include "kernels/cuda/common/device/launch.h"

namespace isobit::cuda {

inline constexpr int kMaxTileThreads = 256;  // per block
inline constexpr int kFewTileThreads = 128;  // a block with fewer threads takes several rows

// The words of a row that this thread handles: first, first + step, ... within the row.
struct RowTile {
  int64_t row;  // may be beyond the last row
  int first;
  int step;
};

// Rows of `words` words (16 bytes, or one element); a thread handles `per_thread` words.
inline Grid TileRows(int64_t rows, int64_t words, int per_thread, unsigned* tiles) {
  const int64_t whole = int64_t{kMaxTileThreads} * per_thread;
  const int64_t count = CeilDiv(words, whole);
  const int64_t threads = RoundUp(CeilDiv(words, count * per_thread), 32);
  const int64_t rows_of_block = count > 1 ? 1 : std::max<int64_t>(1, kFewTileThreads / threads);
  *tiles = static_cast<unsigned>(count);
  return {.blocks = dim3(static_cast<unsigned>(CeilDiv(rows, rows_of_block) * count)),
          .threads = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows_of_block))};
}

#if defined(__CUDACC__)
__device__ __forceinline__ RowTile TileOfBlock(unsigned tiles, int per_thread) {
  const unsigned rows = blockIdx.x / tiles;
  const unsigned tile = blockIdx.x - rows * tiles;
  const unsigned first = tile * blockDim.x * per_thread + threadIdx.x;
  return {int64_t{rows} * blockDim.y + threadIdx.y, static_cast<int>(first),
          static_cast<int>(blockDim.x)};
}
#endif

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_ROWS_TILES_H_
