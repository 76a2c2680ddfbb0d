// What a rank's ops need on its GPU in addition to their arguments. Not here: what they compute
// (tree_cuda_ops.h).
#ifndef ISOBIT_KERNELS_CUDA_CUDA_RESOURCES_H_
#define ISOBIT_KERNELS_CUDA_CUDA_RESOURCES_H_

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_step_tables.h"
#include "kernels/cuda/log_prob_transfer.h"
#include "kernels/device.h"

namespace isobit {

// Ops of several modes may share it if only one thread at a time uses any of them: they then run on
// one stream, in the order of their calls.
struct CudaResources {
  explicit CudaResources(std::unique_ptr<CudaDevice> gpu) : device(std::move(gpu)) {}

  // Makes `scratch` at least `bytes` long. RESOURCE_EXHAUSTED: there is no memory.
  absl::Status ReserveScratch(size_t bytes);

  const std::unique_ptr<CudaDevice> device;
  CudaStepTables tables{*device};
  cuda::LogProbTransfer log_probs;
  Memory scratch;  // of the current op
  size_t scratch_bytes = 0;
  std::vector<Memory> outgrown;  // earlier scratch, which a captured graph may still use
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_CUDA_RESOURCES_H_
