// Products by cuBLAS, and sums over ranks from hop to hop.
#include "kernels/cuda/contrast_ops.h"

#include "common/base/status_macros.h"
#include "kernels/cuda/device/ops.h"
#include "kernels/cuda/linear/packer.h"
#include "kernels/cuda/vanilla/hop_reduce.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/reduce.h"

namespace isobit::cuda {

absl::StatusOr<std::unique_ptr<ContrastOps>> ContrastOps::Create(NumericsMode mode,
                                                                 CudaResources& resources) {
  std::unique_ptr<ContrastOps> ops(new ContrastOps(resources));
  if (mode == NumericsMode::kVanilla) {
    ISOBIT_ASSIGN_OR_RETURN(ops->cublas_, CublasLinear::Create(resources.device->ordinal()));
  }
  return ops;
}

const WeightPacker& ContrastOps::packer() const {
  return cublas_ != nullptr ? static_cast<const WeightPacker&>(packer_) : LinearPacker();
}

absl::Status Run(const LinearArgs& args, ContrastOps& ops) {
  ISOBIT_RETURN_IF_ERROR(ops.resources_.device->Enter());
  const Stream& stream = ops.resources_.device->stream();
  std::byte* product = nullptr;  // before SwiGLU
  if (args.swiglu_out != nullptr) {
    const size_t elements = static_cast<size_t>(args.m * args.weight.shape.n);
    ISOBIT_ASSIGN_OR_RETURN(product, ops.resources_.Scratch(elements * sizeof(Bf16)));
  }
  return ops.cublas_->Run(args, reinterpret_cast<Bf16*>(product), stream);
}

absl::Status Run(const ReduceArgs& args, ContrastOps& ops) {
  ISOBIT_RETURN_IF_ERROR(ops.resources_.device->Enter());
  return LaunchHopReduce(args, /*ring=*/ops.cublas_ != nullptr, ops.resources_.device->stream());
}

}  // namespace isobit::cuda
