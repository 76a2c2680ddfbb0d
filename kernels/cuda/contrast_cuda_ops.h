// The contrast modes of the CUDA backend: their differences from TreeCudaOps. Steps with promised
// bits use none of this.
#ifndef ISOBIT_KERNELS_CUDA_CONTRAST_CUDA_OPS_H_
#define ISOBIT_KERNELS_CUDA_CONTRAST_CUDA_OPS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/tree_cuda_ops.h"
#include "kernels/cuda/vanilla/cublas_linear.h"
#include "kernels/plain_weight_packer.h"

namespace isobit {

// Mode batch_invariant: sums over ranks are added in rank order and rounded to bf16 each time.
class BatchInvariantCudaOps final : public TreeCudaOps {
 public:
  using TreeCudaOps::TreeCudaOps;
  absl::Status Reduce(const ReduceArgs& args) override;
};

// Mode vanilla: cuBLAS multiplies, weights are packed for it, and sums over ranks start at the same
// rank as in a ring all-reduce.
class VanillaCudaOps final : public TreeCudaOps {
 public:
  // RESOURCE_EXHAUSTED: there is no memory. INTERNAL: cuBLAS failed.
  static absl::StatusOr<std::unique_ptr<CudaOps>> Create(std::shared_ptr<CudaResources> resources);

  const WeightPacker& packer() const override { return packer_; }
  absl::Status Linear(const LinearArgs& args) override;
  absl::Status Reduce(const ReduceArgs& args) override;

 private:
  using TreeCudaOps::TreeCudaOps;

  std::unique_ptr<cuda::CublasLinear> cublas_;
  const PlainWeightPacker packer_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_CONTRAST_CUDA_OPS_H_
