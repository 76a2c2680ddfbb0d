// The sum over tensor-parallel ranks in mode vanilla: NCCL adds bf16 partials in an order of its
// own, as in other engines.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_VANILLA_NCCL_BF16_SUM_H_
#define ISOBIT_KERNELS_CUDA_COMMON_VANILLA_NCCL_BF16_SUM_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/parallel/nccl_group.h"
#include "kernels/all_reduce.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/device.h"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {

// May be captured into a graph.
class NcclBf16Sum final : public AllReduce {
 public:
  // For up to max_rows rows of `hidden` columns, in memory of `device`. `nccl` and `stream` outlive
  // the object. RESOURCE_EXHAUSTED: there is no memory.
  static absl::StatusOr<std::unique_ptr<NcclBf16Sum>> Create(int64_t hidden, int64_t max_rows,
                                                             Device& device, NcclGroup& nccl,
                                                             const Stream& stream);

  bool takes_bf16() const override { return true; }
  absl::Status Norm(const void* partial, const RmsNormArgs& norm) override;

 private:
  NcclBf16Sum(NcclGroup& nccl, const Stream& stream) : nccl_(nccl), stream_(stream) {}

  NcclGroup& nccl_;
  const Stream& stream_;
  Memory sum_;  // [max_rows, hidden] bf16
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_VANILLA_NCCL_BF16_SUM_H_
