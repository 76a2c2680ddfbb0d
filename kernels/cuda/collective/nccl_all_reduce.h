// The sum over tensor-parallel ranks by NCCL: for GPUs that cannot map each other's memory, for
// orders of the sum that peer memory does not offer, and for vanilla mode.
#ifndef ISOBIT_KERNELS_CUDA_COLLECTIVE_NCCL_ALL_REDUCE_H_
#define ISOBIT_KERNELS_CUDA_COLLECTIVE_NCCL_ALL_REDUCE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "common/parallel/nccl_group.h"
#include "kernels/all_reduce.h"
#include "kernels/cuda/device/launch.h"

namespace isobit::cuda {

// tree, batch_invariant: all partials are gathered, then each rank adds them in the mode's order,
// so the bits are those of every other path. vanilla: NCCL adds bf16 partials in an order of its
// own, as other engines have it. May be captured into a graph.
class NcclAllReduce final : public AllReduce {
 public:
  // For up to max_rows rows of `hidden` columns. Allocates on the calling thread's device. `nccl`
  // and `stream` outlive the object. RESOURCE_EXHAUSTED: no memory.
  static absl::StatusOr<std::unique_ptr<NcclAllReduce>> Create(NumericsMode mode, int64_t hidden,
                                                               int64_t max_rows, Device& device,
                                                               NcclGroup& nccl,
                                                               const Stream& stream);

  bool takes_bf16() const override { return mode_ == NumericsMode::kVanilla; }
  absl::Status Norm(const void* partial, const RmsNormArgs& norm) override;

 private:
  NcclAllReduce(NumericsMode mode, NcclGroup& nccl, const Stream& stream)
      : mode_(mode), nccl_(nccl), stream_(stream) {}

  const NumericsMode mode_;
  NcclGroup& nccl_;
  const Stream& stream_;
  Memory gathered_;  // [ranks, max_rows, hidden] fp32; vanilla: [max_rows, hidden] bf16
  Memory sum_;       // [max_rows, hidden] fp32; vanilla: none
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COLLECTIVE_NCCL_ALL_REDUCE_H_
