// See nccl_all_reduce.h.
#include "kernels/cuda/collective/nccl_all_reduce.h"

#include <utility>

#include "common/base/status_macros.h"
#include "kernels/cuda/rows/rows.h"

namespace isobit::cuda {

absl::StatusOr<std::unique_ptr<NcclAllReduce>> NcclAllReduce::Create(
    NumericsMode mode, int64_t hidden, int64_t max_rows, Device& device, NcclGroup& nccl,
    const Stream& stream) {
  std::unique_ptr<NcclAllReduce> sum(new NcclAllReduce(mode, nccl, stream));
  const auto elements = static_cast<size_t>(hidden * max_rows);
  if (mode == NumericsMode::kVanilla) {
    ISOBIT_ASSIGN_OR_RETURN(sum->gathered_, device.Allocate(elements * sizeof(Bf16)));
    return sum;
  }
  ISOBIT_ASSIGN_OR_RETURN(
      sum->gathered_, device.Allocate(elements * sizeof(float) * static_cast<size_t>(nccl.size())));
  ISOBIT_ASSIGN_OR_RETURN(sum->sum_, device.Allocate(elements * sizeof(float)));
  return sum;
}

absl::Status NcclAllReduce::Norm(const void* partial, const RmsNormArgs& norm) {
  const int64_t elements = norm.rows * norm.hidden;
  if (mode_ == NumericsMode::kVanilla) {
    auto* const sum = reinterpret_cast<Bf16*>(gathered_.get());
    ISOBIT_RETURN_IF_ERROR(
        nccl_.AllReduceBf16(partial, sum, static_cast<size_t>(elements), stream_.handle));
    return LaunchRmsNormOfBf16Sum(norm, sum, stream_);
  }
  auto* const gathered = reinterpret_cast<float*>(gathered_.get());
  ISOBIT_RETURN_IF_ERROR(nccl_.AllGather(
      partial, gathered, static_cast<size_t>(elements) * sizeof(float), stream_.handle));
  const float* partials[contract::kLeaves] = {};
  for (int r = 0; r < nccl_.size(); ++r) partials[r] = gathered + r * elements;
  auto* const sum = reinterpret_cast<float*>(sum_.get());
  ISOBIT_RETURN_IF_ERROR(LaunchReduce({.partials = partials,
                                       .num_ranks = nccl_.size(),
                                       .begin = 0,
                                       .end = elements,
                                       .count = elements,
                                       .out = sum,
                                       .mode = mode_},
                                      stream_));
  RmsNormArgs summed = norm;
  summed.sum = sum;
  return LaunchRmsNorm(summed, stream_);
}

}  // namespace isobit::cuda
