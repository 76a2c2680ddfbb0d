// Of a build with CUDA. See cuda_backend.h.
#include "rollout/cuda_backend.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/cuda_executor.h"
#include "kernels/cuda/memory_plan.h"
#include "kernels/model/rank_shape.h"

namespace isobit {

absl::Status UseCuda(const CudaBackendOptions& cuda, const ModelConfig& config,
                     EngineOptions& options) {
  ModelRunnerOptions& runner = options.runner;
  ISOBIT_RETURN_IF_ERROR(ShapeOfRank(config, 0, runner.tensor_parallel_size).status());
  std::vector<int> devices = cuda.devices;
  if (devices.empty()) {
    devices.resize(static_cast<size_t>(runner.tensor_parallel_size));
    std::iota(devices.begin(), devices.end(), 0);
  }
  if (devices.size() != static_cast<size_t>(runner.tensor_parallel_size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--devices names ", devices.size(),
        ", expected one for each of --tp_size=", runner.tensor_parallel_size, " ranks"));
  }
  if (runner.num_pages == 0) {
    const auto max_running = static_cast<int64_t>(options.scheduler.max_running);
    ISOBIT_ASSIGN_OR_RETURN(const int32_t affordable,
                            AffordablePages(config, {.devices = devices,
                                                     .mode = runner.mode,
                                                     .page_size = runner.page_size,
                                                     .max_sequences = max_running,
                                                     .max_rows = options.scheduler.max_batch_tokens,
                                                     .peer_memory = cuda.peer_memory,
                                                     .fraction = cuda.memory_fraction}));
    // More than this many can never be in use.
    const int64_t useful = (runner.max_positions / runner.page_size + 1) * max_running;
    runner.num_pages = static_cast<int32_t>(std::min<int64_t>(affordable, useful));
  }
  runner.make_rank = MakeCudaRank({.devices = devices,
                                   .peer_memory = cuda.peer_memory,
                                   .use_graphs = cuda.use_graphs,
                                   .peer_timeout = cuda.peer_timeout,
                                   .fault_rank = cuda.fault_rank,
                                   .fault_step = cuda.fault_step});
  return absl::OkStatus();
}

}  // namespace isobit
