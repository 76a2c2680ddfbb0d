// ncclAllReduce in bf16, then the norm.
#include "kernels/cuda/common/vanilla/nccl_bf16_sum.h"

#include <nccl.h>

#include "common/base/status_macros.h"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {

absl::StatusOr<std::unique_ptr<NcclBf16Sum>> NcclBf16Sum::Create(int64_t hidden, int64_t max_rows,
                                                                 Device& device, NcclGroup& nccl,
                                                                 const Stream& stream) {
  std::unique_ptr<NcclBf16Sum> sum(new NcclBf16Sum(nccl, stream));
  const size_t bytes = static_cast<size_t>(hidden * max_rows) * sizeof(Bf16);
  ISOBIT_ASSIGN_OR_RETURN(sum->sum_, device.Allocate(bytes));
  return sum;
}

absl::Status NcclBf16Sum::Norm(const void* partial, const RmsNormArgs& norm) {
  const auto elements = static_cast<size_t>(norm.rows * norm.hidden);
  auto* const sum = reinterpret_cast<Bf16*>(sum_.get());
  ISOBIT_RETURN_IF_ERROR(nccl_.Run("ncclAllReduce", [&](ncclComm* comm) {
    return ncclAllReduce(partial, sum, elements, ncclBfloat16, ncclSum, comm, stream_.handle);
  }));
  return LaunchRmsNormOfBf16Sum(norm, sum, stream_);
}

}  // namespace isobit::cuda
