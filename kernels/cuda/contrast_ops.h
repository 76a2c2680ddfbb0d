// What differs from mode tree in the contrast modes of the CUDA backend. Steps with promised bits
// use none of this.
#ifndef ISOBIT_KERNELS_CUDA_VANILLA_CONTRAST_OPS_H_
#define ISOBIT_KERNELS_CUDA_VANILLA_CONTRAST_OPS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/config/numerics_mode.h"
#include "kernels/cuda/cuda_resources.h"
#include "kernels/cuda/vanilla/cublas_linear.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/reduce.h"
#include "kernels/plain_weight_packer.h"

namespace isobit::cuda {

// Mode batch_invariant: sums over ranks are added in rank order and rounded to bf16 each time. Mode
// vanilla: they start at the same rank as in a ring all-reduce; and cuBLAS multiplies, with weights
// packed for it.
class ContrastOps {
 public:
  // resources: outlive the object. RESOURCE_EXHAUSTED: there is no memory. INTERNAL: cuBLAS failed.
  static absl::StatusOr<std::unique_ptr<ContrastOps>> Create(NumericsMode mode,
                                                             CudaResources& resources);
  const WeightPacker& packer() const;

 private:
  explicit ContrastOps(CudaResources& resources) : resources_(resources) {}
  friend absl::Status Run(const LinearArgs& args, ContrastOps& ops);
  friend absl::Status Run(const ReduceArgs& args, ContrastOps& ops);

  CudaResources& resources_;
  std::unique_ptr<CublasLinear> cublas_;  // null: mode batch_invariant
  const PlainWeightPacker packer_;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_VANILLA_CONTRAST_OPS_H_
