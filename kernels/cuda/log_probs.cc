// Which kernels a batch of rows needs.
#include "kernels/cuda/log_probs.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/log_probs_kernels.h"

namespace isobit::cuda {

size_t LogProbWorkspaceBytes(int64_t num_rows) { return PlainLogProbWorkspaceBytes(num_rows); }

absl::Status LaunchLogProbs(const DeviceLogProbs& args, const Stream& stream) {
  if (args.vocab > kMaxDeviceVocab) {
    return absl::InvalidArgumentError(absl::StrCat("a vocabulary of ", args.vocab,
                                                   " tokens; at most ", kMaxDeviceVocab,
                                                   " are supported on a GPU"));
  }
  const contract::LeafPlan plan = contract::PlanColumns(args.vocab);
  LogProbJob job{.args = args, .bounds = {}, .longest = 0, .slots = 0};
  for (size_t l = 0; l <= contract::kLeaves; ++l) {
    job.bounds[l] = static_cast<int32_t>(plan.bounds[l]);
    if (l > 0) job.longest = std::max(job.longest, job.bounds[l] - job.bounds[l - 1]);
  }
  const absl::Status status = LaunchPlainLogProbs(job, stream);
  return status.ok() && args.ranked_rows ? LaunchRankedLogProbs(job, stream) : status;
}

}  // namespace isobit::cuda
