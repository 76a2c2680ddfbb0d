// The kernels of LaunchLogProbs, each of which ignores the other's rows, and those for rows whose
// ranges are on several GPUs.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_KERNELS_H_
#define ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/contract/constants.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/log_probs/log_probs.h"

namespace isobit::cuda {

struct RangeResult;

// DeviceLogProbs, and the bounds of the ranges.
struct LogProbJob {
  DeviceLogProbs args;
  RankRanges ranges;                     // those whose logits args.rows have
  RangeResult* range_results = nullptr;  // [num_rows][ranges.count]; null: compute args.results
  int32_t bounds[contract::kLeaves + 1] = {};
  int32_t longest = 0;  // the size of the largest range
  int32_t slots = 0;    // for chunks of logits in a block's shared memory
};

// Rows without filters and top lists, or only some of their ranges.
absl::Status LaunchPlainLogProbs(const LogProbJob& job, const Stream& stream);
absl::Status LaunchJoin(const LogProbJob& job, const RankRangeResults& results,
                        const Stream& stream);
size_t PlainLogProbWorkspaceBytes(int64_t num_rows);

// Rows with filters or top lists.
absl::Status LaunchRankedLogProbs(const LogProbJob& job, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_KERNELS_H_
