// Rows of the embedding table, gathered by token id.
#include <cstdint>

#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/cuda/common/rows/tiles.h"
#include "kernels/ops/embedding.h"

namespace isobit::cuda {
namespace {

constexpr int kWordsOfThread = 2;

// Word: uint4 (eight columns), or Bf16 for rows that are not whole or not aligned.
template <typename Word>
__global__ void __launch_bounds__(kMaxTileThreads)
    EmbeddingKernel(const int32_t* ids, int64_t rows, const Word* table, Word* out, int64_t words,
                    unsigned tiles) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const RowTile tile = TileOfBlock(tiles, kWordsOfThread);
  if (tile.row >= rows) return;
  const Word* from = table + ids[tile.row] * words;
  Word* to = out + tile.row * words;
  Word values[kWordsOfThread];
#pragma unroll
  for (int i = 0; i < kWordsOfThread; ++i) {
    const int word = tile.first + i * tile.step;
    if (word < words) values[i] = from[word];
  }
#pragma unroll
  for (int i = 0; i < kWordsOfThread; ++i) {
    const int word = tile.first + i * tile.step;
    if (word < words) to[word] = values[i];
  }
}

template <typename Word>
absl::Status LaunchWords(const EmbeddingArgs& args, const Stream& stream) {
  const int64_t words = args.hidden * static_cast<int64_t>(sizeof(Bf16)) / sizeof(Word);
  unsigned tiles = 0;
  const Grid grid = TileRows(args.rows, words, kWordsOfThread, &tiles);
  return Launch(EmbeddingKernel<Word>, grid, stream, args.ids, args.rows,
                reinterpret_cast<const Word*>(args.table), reinterpret_cast<Word*>(args.out), words,
                tiles);
}

}  // namespace

absl::Status Run(const EmbeddingArgs& args, const Stream& stream) {
  const bool aligned = args.hidden % 8 == 0 && Aligned16(args.table, args.out);
  return aligned ? LaunchWords<uint4>(args, stream) : LaunchWords<Bf16>(args, stream);
}

}  // namespace isobit::cuda
