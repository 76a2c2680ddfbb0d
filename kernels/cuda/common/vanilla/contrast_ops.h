// What differs from mode tree in the contrast modes of the CUDA backend. Steps with promised bits
// use none of this.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_VANILLA_CONTRAST_OPS_H_
#define ISOBIT_KERNELS_CUDA_COMMON_VANILLA_CONTRAST_OPS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/config/numerics_mode.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/common/vanilla/cublas_linear.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/reduce.h"
#include "kernels/plain_weight_packer.h"

namespace isobit::cuda {

// Mode batch_invariant: sums over ranks are added in rank order and rounded to bf16 each time. Mode
// vanilla: they start at the same rank as in a ring all-reduce; and cuBLAS multiplies, with weights
// packed for it.
class ContrastOps {
 public:
  // The ops run on `stream` of GPU `device`, with its scratch. RESOURCE_EXHAUSTED: there is no
  // memory. INTERNAL: cuBLAS failed.
  static absl::StatusOr<std::unique_ptr<ContrastOps>> Create(NumericsMode mode, int device,
                                                             const Stream& stream);
  // Null: weights are packed as for mode tree.
  const WeightPacker* packer() const { return cublas_ != nullptr ? &packer_ : nullptr; }

 private:
  ContrastOps(int device, const Stream& stream) : device_(device), stream_(stream) {}
  friend absl::Status Run(const LinearArgs& args, ContrastOps& ops);
  friend absl::Status Run(const ReduceArgs& args, ContrastOps& ops);

  const int device_;
  const Stream stream_;
  std::unique_ptr<CublasLinear> cublas_;  // null: mode batch_invariant
  const PlainWeightPacker packer_;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_VANILLA_CONTRAST_OPS_H_
