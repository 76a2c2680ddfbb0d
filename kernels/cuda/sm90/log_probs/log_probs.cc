// Which kernels a batch of rows needs.
#include "kernels/cuda/sm90/log_probs/log_probs.h"

#include <algorithm>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/sm90/log_probs/kernels.h"

namespace isobit::cuda {
namespace {

absl::StatusOr<LogProbJob> JobOf(const DeviceLogProbs& args) {
  if (args.vocab > kMaxDeviceVocab) {
    return absl::InvalidArgumentError(absl::StrCat("a vocabulary of ", args.vocab,
                                                   " tokens; at most ", kMaxDeviceVocab,
                                                   " are supported on a GPU"));
  }
  const contract::LeafPlan plan = contract::PlanColumns(args.vocab);
  LogProbJob job;
  job.args = args;
  for (size_t l = 0; l <= contract::kLeaves; ++l) {
    job.bounds[l] = static_cast<int32_t>(plan.bounds[l]);
    if (l > 0) job.longest = std::max(job.longest, job.bounds[l] - job.bounds[l - 1]);
  }
  return job;
}

}  // namespace

size_t LogProbWorkspaceBytes(int64_t num_rows) { return PlainLogProbWorkspaceBytes(num_rows); }

absl::Status LaunchLogProbs(const DeviceLogProbs& args, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const LogProbJob job, JobOf(args));
  const absl::Status status = LaunchPlainLogProbs(job, stream);
  return status.ok() && args.ranked_rows ? LaunchRankedLogProbs(job, stream) : status;
}

absl::Status LaunchRangeResults(const DeviceLogProbs& args, const RankRanges& ranges,
                                std::byte* results, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(LogProbJob job, JobOf(args));
  job.ranges = ranges;
  job.range_results = reinterpret_cast<RangeResult*>(results);
  return LaunchPlainLogProbs(job, stream);
}

absl::Status LaunchJoinLogProbs(const DeviceLogProbs& args, const RankRangeResults& results,
                                const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const LogProbJob job, JobOf(args));
  return LaunchJoin(job, results, stream);
}

}  // namespace isobit::cuda
