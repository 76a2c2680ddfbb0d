// The CUDA backend: one tensor-parallel rank's ops on one GPU, with the CPU backend's bits.
#ifndef ISOBIT_KERNELS_CUDA_CUDA_OPS_H_
#define ISOBIT_KERNELS_CUDA_CUDA_OPS_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "common/config/numerics_mode.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_step_tables.h"
#include "kernels/ops.h"

namespace isobit {

struct CudaOptions {
  int device = 0;
  NumericsMode mode = NumericsMode::kTree;
  std::optional<cudaStream_t> stream = {};  // where the ops run: see CudaDevice::Create
};

// To be used by one thread at a time. Scratch that an op has used stays allocated, because a
// captured graph may still use it.
class CudaOps : public Ops {
 public:
  CudaDevice& device() override = 0;
  CudaStepTables& tables() override = 0;
};

// FAILED_PRECONDITION: no such device, or it is not Hopper. RESOURCE_EXHAUSTED: no memory.
absl::StatusOr<std::unique_ptr<CudaOps>> MakeCudaOps(const CudaOptions& options);

// The weight packer of the CUDA backend in that mode; needs no GPU.
const WeightPacker& CudaWeightPacker(NumericsMode mode);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_CUDA_OPS_H_
