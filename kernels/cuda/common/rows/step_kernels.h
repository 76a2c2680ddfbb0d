// The small kernels around the forward pass of a rollout step: copies of pages, ids that the
// previous step has drawn, rows that become logits, and the gathers over ranks before and after a
// draw. Every launcher enqueues kernels on the stream, mostly one. All pointers are to GPU memory
// unless they say host; `of_rank` may be a peer's. INTERNAL: CUDA refused a launch.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_ROWS_STEP_KERNELS_H_
#define ISOBIT_KERNELS_CUDA_COMMON_ROWS_STEP_KERNELS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/base/rank_count.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/launch.h"

namespace isobit::cuda {

// Replaces references to the previous step's tokens: ids[i] < 0 becomes drawn[-1 - ids[i]].
absl::Status LaunchFeedIds(const int32_t* drawn, int64_t rows, int32_t* ids, const Stream& stream);

// out[i] = hidden[rows[i]], in rows of `width` elements. `rows` is in host memory that may be
// reused on return.
absl::Status LaunchPickRows(const Bf16* hidden, absl::Span<const int64_t> rows, int64_t width,
                            Bf16* out, const Stream& stream);

// The columns that each rank has computed of every row: columns [begin[r], begin[r + 1]) are in
// of_rank[r], whose leading dimension is their number.
struct RankColumns {
  const float* of_rank[kMaxRanks] = {};
  int64_t begin[kMaxRanks + 1] = {};
  int num_ranks = 0;
};
// out[i] = the whole row first + i: [rows, begin[num_ranks]]. rows: at most 65535.
absl::Status LaunchGatherRows(const RankColumns& columns, int64_t first, int64_t rows, float* out,
                              const Stream& stream);

// What each rank has drawn: ids [begin[r], begin[r + 1]) of the step are in of_rank[r], with the
// same indices as in the step.
struct RankDraws {
  const int32_t* of_rank[kMaxRanks] = {};
  int32_t begin[kMaxRanks + 1] = {};
  int num_ranks = 0;
};
absl::Status LaunchGatherDraws(const RankDraws& draws, int32_t* out, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_ROWS_STEP_KERNELS_H_
