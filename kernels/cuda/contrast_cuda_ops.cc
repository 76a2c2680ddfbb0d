// See contrast_cuda_ops.h.
#include "kernels/cuda/contrast_cuda_ops.h"

#include <utility>

#include "common/base/status_macros.h"
#include "kernels/cuda/vanilla/hop_reduce.h"

namespace isobit {

absl::Status BatchInvariantCudaOps::Reduce(const ReduceArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  return cuda::LaunchHopReduce(args, /*ring=*/false, device().stream());
}

absl::StatusOr<std::unique_ptr<CudaOps>> VanillaCudaOps::Create(
    std::shared_ptr<CudaResources> resources) {
  std::unique_ptr<VanillaCudaOps> ops(new VanillaCudaOps(std::move(resources)));
  ISOBIT_ASSIGN_OR_RETURN(ops->cublas_, cuda::CublasLinear::Create(ops->device().ordinal()));
  return ops;
}

absl::Status VanillaCudaOps::Linear(const LinearArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  if (args.swiglu_out != nullptr) {
    // For the product, before SwiGLU.
    const size_t elements = static_cast<size_t>(args.m * args.weight.shape.n);
    ISOBIT_RETURN_IF_ERROR(resources()->ReserveScratch(elements * sizeof(Bf16)));
  }
  return cublas_->Run(args, reinterpret_cast<Bf16*>(resources()->scratch.get()), device().stream());
}

absl::Status VanillaCudaOps::Reduce(const ReduceArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  return cuda::LaunchHopReduce(args, /*ring=*/true, device().stream());
}

}  // namespace isobit
