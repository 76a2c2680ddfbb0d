// The kernels of LaunchLogProbs, each of which leaves the other's rows alone, and those of rows in
// parts.
#ifndef ISOBIT_KERNELS_CUDA_LOG_PROBS_KERNELS_H_
#define ISOBIT_KERNELS_CUDA_LOG_PROBS_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/contract/constants.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/log_probs/log_probs.h"

namespace isobit::cuda {

struct RangeResult;

// DeviceLogProbs and where the ranges are cut.
struct LogProbJob {
  DeviceLogProbs args;
  RankRanges ranges;                     // whose logits args.rows have
  RangeResult* range_results = nullptr;  // [num_rows][ranges.count]; null: ranges join to results
  int32_t bounds[contract::kLeaves + 1] = {};
  int32_t longest = 0;  // range
  int32_t slots = 0;    // for chunks of logits in a block's shared memory
};

// Rows without filters and top lists, or parts of them.
absl::Status LaunchPlainLogProbs(const LogProbJob& job, const Stream& stream);
absl::Status LaunchJoin(const LogProbJob& job, const RankRangeResults& results,
                        const Stream& stream);
size_t PlainLogProbWorkspaceBytes(int64_t num_rows);

// Rows with.
absl::Status LaunchRankedLogProbs(const LogProbJob& job, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LOG_PROBS_KERNELS_H_
