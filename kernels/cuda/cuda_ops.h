// The CUDA backend: one tensor-parallel rank's ops on one GPU, with the CPU backend's bits.
#ifndef ISOBIT_KERNELS_CUDA_CUDA_OPS_H_
#define ISOBIT_KERNELS_CUDA_CUDA_OPS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "common/config/numerics_mode.h"
#include "kernels/ops.h"

namespace isobit {

struct CudaOptions {
  int device = 0;
  // kVanilla packs weights for cuBLAS and multiplies with it; the other ops are the same in all
  // modes.
  NumericsMode mode = NumericsMode::kTree;
};

// Ops run in order on a stream of their own. Use the object from one thread at a time.
// FAILED_PRECONDITION: no such device, or it is not Hopper. RESOURCE_EXHAUSTED: no memory.
absl::StatusOr<std::unique_ptr<Ops>> MakeCudaOps(const CudaOptions& options);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_CUDA_OPS_H_
