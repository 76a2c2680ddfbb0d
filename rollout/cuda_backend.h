// The engine's ranks on GPUs, as the flags of isobit-rollout ask for them. Defined twice: in a
// build with CUDA, and in one that says it has none.
#ifndef ISOBIT_ROLLOUT_CUDA_BACKEND_H_
#define ISOBIT_ROLLOUT_CUDA_BACKEND_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/checkpoint/model_config.h"
#include "rollout/engine.h"

namespace isobit {

struct CudaBackendOptions {
  std::vector<int> devices;      // by rank; empty: 0, 1, ...
  double memory_fraction = 0.9;  // of the GPUs' free memory, that the engine may take
  bool peer_memory = true;       // see CudaRankOptions
  bool use_graphs = true;
  absl::Duration peer_timeout = absl::Seconds(2);
  int fault_rank = -1;  // see CudaRankOptions
  int64_t fault_step = 0;
};

// Sets options.runner.make_rank and, if it is 0, options.runner.num_pages, to what fits. All else
// of `options` is set already. INVALID_ARGUMENT: tensor_parallel_size, or not as many devices.
// FAILED_PRECONDITION: no usable GPU, or a build without CUDA. Errors of AffordablePages.
absl::Status UseCuda(const CudaBackendOptions& cuda, const ModelConfig& config,
                     EngineOptions& options);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_CUDA_BACKEND_H_
