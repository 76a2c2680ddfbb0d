// How an elementwise op over a matrix becomes a grid: every block takes one tile of one row, and
// the tiles of a row are equal, so that a width that is no power of two leaves few threads idle.
#ifndef ISOBIT_KERNELS_CUDA_ROW_TILES_H_
#define ISOBIT_KERNELS_CUDA_ROW_TILES_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.h"

namespace isobit::cuda {

inline constexpr int kMaxTileThreads = 256;

// Words of a row that this thread handles: first, first + step, ... while below the row's words.
struct RowTile {
  int64_t row;
  int first;
  int step;
};

// Rows of `words` words (16 bytes, or one element), of which a thread handles `per_thread`.
inline Grid TileRows(int64_t rows, int64_t words, int per_thread, unsigned* tiles) {
  const int64_t whole = int64_t{kMaxTileThreads} * per_thread;
  const int64_t count = (words + whole - 1) / whole;
  const int64_t threads = ((words + count * per_thread - 1) / (count * per_thread) + 31) / 32 * 32;
  *tiles = static_cast<unsigned>(count);
  return {.blocks = dim3(static_cast<unsigned>(rows * count)),
          .threads = dim3(static_cast<unsigned>(threads))};
}

#if defined(__CUDACC__)
__device__ __forceinline__ RowTile TileOfBlock(unsigned tiles, int per_thread) {
  const unsigned row = blockIdx.x / tiles;
  const unsigned tile = blockIdx.x - row * tiles;
  const unsigned first = tile * blockDim.x * per_thread + threadIdx.x;
  return {row, static_cast<int>(first), static_cast<int>(blockDim.x)};
}
#endif

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_ROW_TILES_H_
