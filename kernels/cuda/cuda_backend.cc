// Makes the CUDA backend's table of ops.
#include "kernels/cuda/cuda_backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/sm90/linear/packer.h"

namespace isobit {

CudaBackend::CudaBackend(std::shared_ptr<CudaResources> resources)
    : name_(absl::StrCat("cuda/", resources->device->name())), resources_(std::move(resources)) {
  Fill(*resources_);
}

absl::StatusOr<std::unique_ptr<CudaBackend>> CudaBackend::Create(const CudaOptions& options) {
  std::shared_ptr<CudaResources> resources = options.resources;
  if (resources == nullptr) {
    ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device,
                            CudaDevice::Create(options.device, options.stream));
    resources = std::make_shared<CudaResources>(std::move(device));
  }
  std::unique_ptr<CudaBackend> backend(new CudaBackend(std::move(resources)));
  if (options.mode == NumericsMode::kTree) return backend;
  ISOBIT_ASSIGN_OR_RETURN(
      backend->contrast_,
      cuda::ContrastOps::Create(options.mode, backend->resources_->device->ordinal(),
                                backend->resources_->stream()));
  backend->Replace<ReduceArgs>(*backend->contrast_);
  if (options.mode == NumericsMode::kVanilla) backend->Replace<LinearArgs>(*backend->contrast_);
  return backend;
}

const WeightPacker& CudaBackend::packer() const {
  const WeightPacker* const packer = contrast_ != nullptr ? contrast_->packer() : nullptr;
  return packer != nullptr ? *packer : cuda::LinearPacker();
}

}  // namespace isobit
