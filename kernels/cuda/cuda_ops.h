// The interface of the CUDA backend: the ops of one tensor-parallel rank on one GPU, with the bits
// of the CPU backend.
#ifndef ISOBIT_KERNELS_CUDA_CUDA_OPS_H_
#define ISOBIT_KERNELS_CUDA_CUDA_OPS_H_

#include <memory>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_resources.h"
#include "kernels/cuda/cuda_step_tables.h"
#include "kernels/ops.h"

namespace isobit {

// Used by one thread at a time. Scratch that an op has used stays allocated, because a captured
// graph may still use it.
class CudaOps : public Ops {
 public:
  CudaDevice& device() override = 0;
  CudaStepTables& tables() override = 0;
  // What ops of another mode can share with these (CudaOptions::resources).
  virtual const std::shared_ptr<CudaResources>& resources() const = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_CUDA_OPS_H_
