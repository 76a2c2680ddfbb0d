// The sum over tensor-parallel ranks by NCCL, for GPUs that cannot map each other's memory.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_COLLECTIVE_NCCL_ALL_REDUCE_H_
#define ISOBIT_KERNELS_CUDA_COMMON_COLLECTIVE_NCCL_ALL_REDUCE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/parallel/nccl_group.h"
#include "kernels/all_reduce.h"
#include "kernels/backend.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {

// Gathers the partials by all-gather; then each rank adds them with its ops. So the bits are those
// of every other path. May be captured into a graph.
class NcclAllReduce final : public AllReduce {
 public:
  // For up to max_rows rows of `hidden` columns. `ops`, which run on `stream`, and `nccl` outlive
  // the object. RESOURCE_EXHAUSTED: there is no memory.
  static absl::StatusOr<std::unique_ptr<NcclAllReduce>> Create(int64_t hidden, int64_t max_rows,
                                                               Backend& ops, NcclGroup& nccl,
                                                               const Stream& stream);

  absl::Status Norm(const void* partial, const RmsNormArgs& norm) override;

 private:
  NcclAllReduce(Backend& ops, NcclGroup& nccl, const Stream& stream)
      : ops_(ops), nccl_(nccl), stream_(stream) {}

  Backend& ops_;
  NcclGroup& nccl_;
  const Stream& stream_;
  Memory gathered_;  // [ranks, max_rows, hidden] fp32
  Memory sum_;       // [max_rows, hidden] fp32
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_COLLECTIVE_NCCL_ALL_REDUCE_H_
