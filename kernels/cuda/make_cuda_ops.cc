// See make_cuda_ops.h.
#include "kernels/cuda/make_cuda_ops.h"

#include <utility>

#include "common/base/status_macros.h"
#include "kernels/cuda/contrast_cuda_ops.h"
#include "kernels/cuda/tree_cuda_ops.h"

namespace isobit {

absl::StatusOr<std::unique_ptr<CudaOps>> MakeCudaOps(const CudaOptions& options) {
  std::shared_ptr<CudaResources> resources = options.resources;
  if (resources == nullptr) {
    ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device,
                            CudaDevice::Create(options.device, options.stream));
    resources = std::make_shared<CudaResources>(std::move(device));
  }
  switch (options.mode) {
    case NumericsMode::kTree:
      break;
    case NumericsMode::kBatchInvariant:
      return std::make_unique<BatchInvariantCudaOps>(std::move(resources));
    case NumericsMode::kVanilla:
      return VanillaCudaOps::Create(std::move(resources));
  }
  return std::make_unique<TreeCudaOps>(std::move(resources));
}

}  // namespace isobit
