// Capture, instantiation and replay by CUDA's calls.
#include "kernels/cuda/common/device/captured_graph.h"

#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"

namespace isobit::cuda {

absl::StatusOr<CapturedGraph> CapturedGraph::Capture(cudaStream_t stream,
                                                     const std::function<absl::Status()>& work) {
  // Thread local: the threads of other ranks may allocate memory at the same time.
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  absl::Status status = work();
  cudaGraph_t graph = nullptr;
  status.Update(CudaStatus(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture"));
  cudaGraphExec_t instance = nullptr;
  if (status.ok()) {
    status = CudaStatus(cudaGraphInstantiate(&instance, graph, 0), "cudaGraphInstantiate");
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  ISOBIT_RETURN_IF_ERROR(status);
  CapturedGraph result(instance);
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaGraphUpload(instance, stream));
  return result;
}

CapturedGraph::~CapturedGraph() {
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
}

absl::Status CapturedGraph::Replay(cudaStream_t stream) const {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaGraphLaunch(graph_, stream));
  return absl::OkStatus();
}

}  // namespace isobit::cuda
