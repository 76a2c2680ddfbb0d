// An all-gather by NCCL, then Reduce and RmsNorm on every rank.
#include "kernels/cuda/common/collective/nccl_all_reduce.h"

#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/ops/reduce.h"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {

absl::StatusOr<std::unique_ptr<NcclAllReduce>> NcclAllReduce::Create(int64_t hidden,
                                                                     int64_t max_rows, Backend& ops,
                                                                     NcclGroup& nccl,
                                                                     const Stream& stream) {
  std::unique_ptr<NcclAllReduce> sum(new NcclAllReduce(ops, nccl, stream));
  const size_t bytes = static_cast<size_t>(hidden * max_rows) * sizeof(float);
  ISOBIT_ASSIGN_OR_RETURN(sum->gathered_,
                          ops.device().Allocate(bytes * static_cast<size_t>(nccl.size())));
  ISOBIT_ASSIGN_OR_RETURN(sum->sum_, ops.device().Allocate(bytes));
  return sum;
}

absl::Status NcclAllReduce::Norm(const void* partial, const RmsNormArgs& norm) {
  const int64_t elements = norm.rows * norm.hidden;
  auto* const gathered = reinterpret_cast<float*>(gathered_.get());
  ISOBIT_RETURN_IF_ERROR(nccl_.AllGather(
      partial, gathered, static_cast<size_t>(elements) * sizeof(float), stream_.handle));
  const float* partials[contract::kLeaves] = {};
  for (int r = 0; r < nccl_.size(); ++r) partials[r] = gathered + r * elements;
  auto* const sum = reinterpret_cast<float*>(sum_.get());
  ISOBIT_RETURN_IF_ERROR(ops_.Run(ReduceArgs{.partials = partials,
                                             .num_ranks = nccl_.size(),
                                             .begin = 0,
                                             .end = elements,
                                             .count = elements,
                                             .out = sum}));
  RmsNormArgs summed = norm;
  summed.sum = sum;
  return ops_.Run(summed);
}

}  // namespace isobit::cuda
