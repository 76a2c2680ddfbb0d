// Of a build without CUDA. See cuda_backend.h.
#include "rollout/cuda_backend.h"

namespace isobit {

absl::Status UseCuda(const CudaBackendOptions& /*cuda*/, const ModelConfig& /*config*/,
                     EngineOptions& /*options*/) {
  return absl::FailedPreconditionError(
      "--backend is cuda, but this isobit-rollout was built without CUDA; 'make build-gpu' builds "
      "one with it, in build/cuda");
}

}  // namespace isobit
