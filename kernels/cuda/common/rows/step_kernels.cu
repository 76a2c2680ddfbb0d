// The kernels and their launchers.
#include <algorithm>
#include <cstdint>

#include "common/base/round_up.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/rows/step_kernels.h"
#include "kernels/ops/paged_kv.h"

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

// Lists are kernel arguments, so that no copy brings them: these fit into the 4 KiB of arguments.
struct PickedRows {
  static constexpr size_t kMost = 512;
  int32_t row[kMost];
};
struct CopiedPages {
  static constexpr size_t kMost = 256;
  PageCopy copy[kMost];
};

// Word: uint4 (eight elements), or Bf16.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    PickRowsKernel(const Word* hidden, const __grid_constant__ PickedRows picked, int64_t words,
                   Word* out) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t r = blockIdx.y;
  if (i < words) out[r * words + i] = hidden[picked.row[r] * words + i];
}

template <typename Word>
absl::Status LaunchPickWords(const Bf16* hidden, const PickedRows& picked, int64_t rows,
                             int64_t width, Bf16* out, const Stream& stream) {
  const int64_t words = width * static_cast<int64_t>(sizeof(Bf16)) / sizeof(Word);
  return Launch(PickRowsKernel<Word>, Blocks(words, rows), stream,
                reinterpret_cast<const Word*>(hidden), picked, words, reinterpret_cast<Word*>(out));
}

// Loads of a thread, so that enough loads, also of a peer's memory, are in flight. Neighbouring
// threads load neighbouring elements.
constexpr int kLoads = 8;

// A plane has plane_words words, a page of it page_words.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    CopyPagesKernel(Word* planes, int64_t plane_words, int64_t page_words,
                    const __grid_constant__ CopiedPages pages) {
  ReleaseSuccessor();
  WaitForPredecessor();
  Word* const plane = planes + blockIdx.y * plane_words;
  const PageCopy copy = pages.copy[blockIdx.z];
  const Word* from = plane + copy.from * page_words;
  Word* to = plane + copy.to * page_words;
  const int64_t start = int64_t{blockIdx.x} * (kThreads * kLoads) + threadIdx.x;
  Word words[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (start + i * kThreads < page_words) words[i] = from[start + i * kThreads];
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (start + i * kThreads < page_words) to[start + i * kThreads] = words[i];
  }
}

template <typename Word>
absl::Status LaunchCopyWords(const CopyPagesArgs& args, const CopiedPages& pages, size_t count,
                             const Stream& stream) {
  constexpr int64_t kElements = sizeof(Word) / sizeof(Bf16);
  const int64_t words = args.page_elements / kElements;
  Grid grid = Blocks(CeilDiv(words, kLoads), args.num_planes);
  grid.blocks.z = static_cast<unsigned>(count);
  return Launch(CopyPagesKernel<Word>, grid, stream, reinterpret_cast<Word*>(args.planes),
                args.plane_stride / kElements, words, pages);
}

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

absl::Status LaunchPickRows(const Bf16* hidden, absl::Span<const int64_t> rows, int64_t width,
                            Bf16* out, const Stream& stream) {
  const bool whole = width % 8 == 0 && Aligned16(hidden, out);
  for (size_t begin = 0; begin < rows.size(); begin += PickedRows::kMost) {
    const absl::Span<const int64_t> some = rows.subspan(begin, PickedRows::kMost);
    PickedRows picked = {};
    std::copy(some.begin(), some.end(), picked.row);
    const auto count = static_cast<int64_t>(some.size());
    Bf16* const to = out + static_cast<int64_t>(begin) * width;
    const absl::Status status =
        whole ? LaunchPickWords<uint4>(hidden, picked, count, width, to, stream)
              : LaunchPickWords<Bf16>(hidden, picked, count, width, to, stream);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Run(const CopyPagesArgs& args, const Stream& stream) {
  const bool whole =
      args.page_elements % 8 == 0 && args.plane_stride % 8 == 0 && Aligned16(args.planes);
  for (size_t next = 0; next < args.copies.size();) {
    // A launch makes its copies in any order.
    CopiedPages pages = {};
    size_t count = 0;
    const auto waits = [&](const PageCopy& later) {
      return std::any_of(pages.copy, pages.copy + count, [&](const PageCopy& earlier) {
        return later.to == earlier.from || later.to == earlier.to || later.from == earlier.to;
      });
    };
    while (next < args.copies.size() && count < CopiedPages::kMost && !waits(args.copies[next])) {
      pages.copy[count++] = args.copies[next++];
    }
    const absl::Status status = whole ? LaunchCopyWords<uint4>(args, pages, count, stream)
                                      : LaunchCopyWords<Bf16>(args, pages, count, stream);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
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
