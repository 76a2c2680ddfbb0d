// Gathers the addresses of partial sums; the backend's Reduce and RmsNorm follow.
#include "kernels/gather_all_reduce.h"

#include <algorithm>

#include "absl/types/span.h"
#include "common/base/status_macros.h"

namespace isobit {

absl::Status GatherAllReduce::Norm(const void* partial, const RmsNormArgs& norm) {
  const int64_t elements = norm.rows * norm.hidden;
  const size_t bytes = static_cast<size_t>(elements) * sizeof(float);
  if (sum_bytes_ < bytes) {
    ISOBIT_ASSIGN_OR_RETURN(sum_, ops_.device().Allocate(bytes));
    sum_bytes_ = bytes;
  }
  ISOBIT_RETURN_IF_ERROR(ops_.device().Synchronize());  // peers read what these ops have written
  ISOBIT_ASSIGN_OR_RETURN(const absl::Span<const void* const> sent, comm_.Gather(partial, bytes));
  const float* partials[contract::kLeaves] = {};
  std::transform(sent.begin(), sent.end(), partials,
                 [](const void* p) { return static_cast<const float*>(p); });
  auto* const sum = reinterpret_cast<float*>(sum_.get());
  ISOBIT_RETURN_IF_ERROR(ops_.Run(ReduceArgs{.partials = partials,
                                             .num_ranks = comm_.size(),
                                             .begin = 0,
                                             .end = elements,
                                             .count = elements,
                                             .out = sum}));
  RmsNormArgs summed = norm;
  summed.sum = sum;
  return ops_.Run(summed);
}

absl::Status GatherAllReduce::Send(int half, const float* partial, int64_t /*rows*/) {
  sent_[half] = partial;
  return absl::OkStatus();
}

absl::Status GatherAllReduce::Sum(int half, const RmsNormArgs& norm) {
  rows_[half] = norm.out;
  return Norm(sent_[half], norm);
}

}  // namespace isobit
