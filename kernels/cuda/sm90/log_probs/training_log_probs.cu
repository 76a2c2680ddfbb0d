// Logprobs of training's rows: serving's kernels, told by tensors what to compute.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/log_probs/log_probs.h"
#include "kernels/ops/log_probs.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 128;

template <typename T>
__device__ __forceinline__ T ValueOr(const T* values, int64_t i, T otherwise) {
  return values != nullptr ? values[i] : otherwise;
}

__global__ void __launch_bounds__(kThreads)
    FillRowsKernel(const TrainingLogProbsArgs a, DeviceLogProbRow* rows) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.rows) return;
  DeviceLogProbRow row;
  row.logits = a.logits + i * a.vocab;
  row.temperature = ValueOr(a.sampling.temperature, i, 1.0f);
  row.top_k = ValueOr(a.sampling.top_k, i, 0);
  row.top_p = ValueOr(a.sampling.top_p, i, 1.0f);
  row.min_p = ValueOr(a.sampling.min_p, i, 0.0f);
  row.target = a.targets[i];
  row.want_entropy = true;
  rows[i] = row;
}

size_t RowBytes(int64_t rows) {
  return RoundUp(static_cast<size_t>(rows) * sizeof(DeviceLogProbRow), 16);
}

}  // namespace

// Rows without a filter cost as much as in serving; if a row may have a filter, as the pointers of
// args.sampling say, one more launch is needed. last_z may be +0 where the oracle has -0. In a row
// without filters, if a finite logit becomes a z of -inf (temperatures near 0), `last_id` is still
// -1; LogProbGradient skips such tokens.
absl::Status Run(const TrainingLogProbsArgs& args, const Stream& stream) {
  if (args.rows == 0) return absl::OkStatus();
  ISOBIT_ASSIGN_OR_RETURN(
      std::byte* const workspace,
      ScratchOf(stream, RowBytes(args.rows) + LogProbWorkspaceBytes(args.rows)));
  auto* const rows = reinterpret_cast<DeviceLogProbRow*>(workspace);
  std::byte* const zeroed = workspace + RowBytes(args.rows);
  ISOBIT_RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(zeroed, 0, LogProbWorkspaceBytes(args.rows), stream.handle));
  const auto blocks = static_cast<unsigned>(CeilDiv(args.rows, int64_t{kThreads}));
  const Stream after_memset = stream.WithDependent(false);  // which is no kernel
  ISOBIT_RETURN_IF_ERROR(Launch(FillRowsKernel, {.blocks = dim3(blocks), .threads = dim3(kThreads)},
                                after_memset, args, rows));
  DeviceLogProbs job;
  job.rows = rows;
  job.num_rows = args.rows;
  job.vocab = args.vocab;
  job.training = {.logprobs = args.logprobs, .entropies = args.entropies, .state = args.state};
  job.workspace = zeroed;
  const TrainingSampling& s = args.sampling;
  job.ranked_rows = s.top_k != nullptr || s.top_p != nullptr || s.min_p != nullptr;
  return LaunchLogProbs(job, stream.WithDependent(true));
}

}  // namespace isobit::cuda
