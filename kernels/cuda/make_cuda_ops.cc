// See make_cuda_ops.h.
#include "kernels/cuda/make_cuda_ops.h"

#include <utility>

#include "common/base/status_macros.h"
#include "kernels/cuda/contrast_cuda_ops.h"
#include "kernels/cuda/tree_cuda_ops.h"

namespace isobit {

absl::StatusOr<std::unique_ptr<CudaOps>> MakeCudaOps(const CudaOptions& options) {
  ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device,
                          CudaDevice::Create(options.device, options.stream));
  switch (options.mode) {
    case NumericsMode::kTree:
      break;
    case NumericsMode::kBatchInvariant:
      return std::make_unique<BatchInvariantCudaOps>(std::move(device));
    case NumericsMode::kVanilla:
      return VanillaCudaOps::Create(std::move(device));
  }
  return std::make_unique<TreeCudaOps>(std::move(device));
}

}  // namespace isobit
