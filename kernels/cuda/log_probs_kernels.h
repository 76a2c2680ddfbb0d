// The two kernels of LaunchLogProbs, each of which leaves the other's rows alone.
#ifndef ISOBIT_KERNELS_CUDA_LOG_PROBS_KERNELS_H_
#define ISOBIT_KERNELS_CUDA_LOG_PROBS_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/contract/constants.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/log_probs.h"

namespace isobit::cuda {

// DeviceLogProbs and where the ranges are cut.
struct LogProbJob {
  DeviceLogProbs args;
  int32_t bounds[contract::kLeaves + 1];
  int32_t longest;  // range
  int32_t slots;    // for chunks of logits in a block's shared memory
};

// Rows without filters and top lists.
absl::Status LaunchPlainLogProbs(const LogProbJob& job, const Stream& stream);
size_t PlainLogProbWorkspaceBytes(int64_t num_rows);

// Rows with.
absl::Status LaunchRankedLogProbs(const LogProbJob& job, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LOG_PROBS_KERNELS_H_
