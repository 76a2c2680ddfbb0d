// Products by cuBLAS, and sums over ranks from hop to hop.
#include "kernels/cuda/common/vanilla/contrast_ops.h"

#include <cuda_runtime_api.h>

#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/vanilla/hop_reduce.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/reduce.h"

namespace isobit::cuda {

absl::StatusOr<std::unique_ptr<ContrastOps>> ContrastOps::Create(NumericsMode mode, int device,
                                                                 const Stream& stream) {
  std::unique_ptr<ContrastOps> ops(new ContrastOps(device, stream));
  if (mode == NumericsMode::kVanilla) {
    ISOBIT_ASSIGN_OR_RETURN(ops->cublas_, CublasLinear::Create(device));
  }
  return ops;
}

absl::Status Run(const LinearArgs& args, ContrastOps& ops) {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(ops.device_));
  std::byte* product = nullptr;  // before SwiGLU
  if (args.swiglu_out != nullptr) {
    const size_t elements = static_cast<size_t>(args.m * args.weight.shape.n);
    ISOBIT_ASSIGN_OR_RETURN(product, ScratchOf(ops.stream_, elements * sizeof(Bf16)));
  }
  return ops.cublas_->Run(args, reinterpret_cast<Bf16*>(product), ops.stream_);
}

absl::Status Run(const ReduceArgs& args, ContrastOps& ops) {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(ops.device_));
  return LaunchHopReduce(args, /*ring=*/ops.cublas_ != nullptr, ops.stream_);
}

}  // namespace isobit::cuda
