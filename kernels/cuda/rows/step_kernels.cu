// See step_kernels.h.
#include <cstdint>

#include "common/base/round_up.h"
#include "kernels/cuda/device/alignment.h"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/rows/step_kernels.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 256;

Grid Blocks(int64_t elements, int64_t rows = 1) {
  return {.blocks =
              dim3(static_cast<unsigned>(CeilDiv(elements, kThreads)), static_cast<unsigned>(rows)),
          .threads = dim3(kThreads)};
}

__global__ void __launch_bounds__(kThreads)
    FeedIdsKernel(const int32_t* drawn, int64_t rows, int32_t* ids) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < rows && ids[i] < 0) ids[i] = drawn[-1 - ids[i]];
}

// Word: uint4 (eight elements), or Bf16.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    LastRowsKernel(const Word* hidden, const int32_t* first_row, int64_t words, Word* out) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t s = blockIdx.y;
  if (i < words) out[s * words + i] = hidden[(int64_t{first_row[s + 1]} - 1) * words + i];
}

template <typename Word>
absl::Status LaunchWordsOfLastRows(const Bf16* hidden, const int32_t* first_row, int64_t sequences,
                                   int64_t width, Bf16* out, const Stream& stream) {
  const int64_t words = width * static_cast<int64_t>(sizeof(Bf16)) / sizeof(Word);
  return Launch(LastRowsKernel<Word>, Blocks(words, sequences), stream,
                reinterpret_cast<const Word*>(hidden), first_row, words,
                reinterpret_cast<Word*>(out));
}

// Loads of a thread, so that enough loads of a peer's memory are in flight. Neighbouring threads
// load neighbouring elements.
constexpr int kLoads = 8;

__global__ void __launch_bounds__(kThreads)
    GatherRowsKernel(const __grid_constant__ RankColumns columns, int64_t first, float* out) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t row = blockIdx.y;
  const int rank = static_cast<int>(blockIdx.z);
  const int64_t begin = columns.begin[rank];
  const int64_t width = columns.begin[rank + 1] - begin;
  const float* from = columns.of_rank[rank] + (first + row) * width;
  float* to = out + row * columns.begin[columns.num_ranks] + begin;
  const int64_t start = int64_t{blockIdx.x} * (kThreads * kLoads) + threadIdx.x;
  float values[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (start + i * kThreads < width) values[i] = from[start + i * kThreads];
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (start + i * kThreads < width) to[start + i * kThreads] = values[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    GatherDrawsKernel(const __grid_constant__ RankDraws draws, int32_t* out) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  for (int r = 0; r < draws.num_ranks; ++r) {
    if (i >= draws.begin[r] && i < draws.begin[r + 1]) out[i] = draws.of_rank[r][i];
  }
}

}  // namespace

absl::Status LaunchFeedIds(const int32_t* drawn, int64_t rows, int32_t* ids, const Stream& stream) {
  return Launch(FeedIdsKernel, Blocks(rows), stream, drawn, rows, ids);
}

absl::Status LaunchLastRows(const Bf16* hidden, const int32_t* first_row, int64_t sequences,
                            int64_t width, Bf16* out, const Stream& stream) {
  return width % 8 == 0 && Aligned16(hidden, out)
             ? LaunchWordsOfLastRows<uint4>(hidden, first_row, sequences, width, out, stream)
             : LaunchWordsOfLastRows<Bf16>(hidden, first_row, sequences, width, out, stream);
}

absl::Status LaunchGatherRows(const RankColumns& columns, int64_t first, int64_t rows, float* out,
                              const Stream& stream) {
  int64_t widest = 0;
  for (int r = 0; r < columns.num_ranks; ++r) {
    widest = widest > columns.begin[r + 1] - columns.begin[r]
                 ? widest
                 : columns.begin[r + 1] - columns.begin[r];
  }
  Grid grid = Blocks(CeilDiv(widest, kLoads), rows);
  grid.blocks.z = static_cast<unsigned>(columns.num_ranks);
  return Launch(GatherRowsKernel, grid, stream, columns, first, out);
}

absl::Status LaunchGatherDraws(const RankDraws& draws, int32_t* out, const Stream& stream) {
  return Launch(GatherDrawsKernel, Blocks(draws.begin[draws.num_ranks]), stream, draws, out);
}

}  // namespace isobit::cuda
