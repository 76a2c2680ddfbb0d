// A CUDA graph: launches on a stream, captured once and replayed together.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_CAPTURED_GRAPH_H_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_CAPTURED_GRAPH_H_

#include <cuda_runtime_api.h>

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isobit::cuda {

class CapturedGraph {
 public:
  // Captures what `work` enqueues on the stream, without running it. `work` must not allocate.
  static absl::StatusOr<CapturedGraph> Capture(cudaStream_t stream,
                                               const std::function<absl::Status()>& work);
  CapturedGraph(CapturedGraph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
  CapturedGraph& operator=(CapturedGraph&& other) noexcept {
    std::swap(graph_, other.graph_);
    return *this;
  }
  ~CapturedGraph();

  absl::Status Replay(cudaStream_t stream) const;

 private:
  explicit CapturedGraph(cudaGraphExec_t graph) : graph_(graph) {}
  cudaGraphExec_t graph_;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_CAPTURED_GRAPH_H_
