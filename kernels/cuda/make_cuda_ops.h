// Makes the CUDA backend's ops for a numerics mode.
#ifndef ISOBIT_KERNELS_CUDA_MAKE_CUDA_OPS_H_
#define ISOBIT_KERNELS_CUDA_MAKE_CUDA_OPS_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "common/config/numerics_mode.h"
#include "kernels/cuda/cuda_ops.h"

namespace isobit {

struct CudaOptions {
  int device = 0;
  NumericsMode mode = NumericsMode::kTree;
  std::optional<cudaStream_t> stream = {};  // on which the ops run: see CudaDevice::Create
  // Those of other ops, to be shared; `device` and `stream` are then unused. Null: not shared.
  std::shared_ptr<CudaResources> resources = nullptr;
};

// FAILED_PRECONDITION: the device does not exist or is not Hopper. RESOURCE_EXHAUSTED: no memory.
absl::StatusOr<std::unique_ptr<CudaOps>> MakeCudaOps(const CudaOptions& options);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_MAKE_CUDA_OPS_H_
