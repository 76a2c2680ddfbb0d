// What the ops of a rank need on its GPU besides their arguments. Not here: what they compute
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

// Ops of several modes may share it, if one thread at a time uses any of them: they then run on one
// stream, in the order of their calls.
struct CudaResources {
  explicit CudaResources(std::unique_ptr<CudaDevice> gpu) : device(std::move(gpu)) {}

  // Makes `scratch` hold at least `bytes`. RESOURCE_EXHAUSTED: no memory.
  absl::Status ReserveScratch(size_t bytes);

  const std::unique_ptr<CudaDevice> device;
  CudaStepTables tables{*device};
  cuda::LogProbTransfer log_probs;
  Memory scratch;  // of the present op
  size_t scratch_bytes = 0;
  std::vector<Memory> outgrown;  // former scratch, which a captured graph may still use
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_CUDA_RESOURCES_H_
