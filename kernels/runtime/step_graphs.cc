// See step_graphs.h.
#include "kernels/runtime/step_graphs.h"

#include <algorithm>
#include <utility>

#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"

namespace isobit {

std::vector<int64_t> GraphSizes(int64_t max_sequences) {
  const int64_t most = std::min(max_sequences, kMaxGraphSequences);
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size < most;) {
    sizes.push_back(size);
    size += size < 8 ? size : size < 64 ? 8 : size < 256 ? 32 : 64;
  }
  sizes.push_back(most);
  return sizes;
}

absl::Status StepGraphs::Capture(const std::vector<int64_t>& sizes, bool share, cudaStream_t stream,
                                 UploadEmpty upload, DecodeStep decode) {
  const auto capture = [&](int64_t size,
                           cuda::Sharing sharing) -> absl::StatusOr<cuda::CapturedGraph> {
    ISOBIT_ASSIGN_OR_RETURN(const UploadedStep step, upload(size, sharing));
    ISOBIT_RETURN_IF_ERROR(decode(step, size));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
    return cuda::CapturedGraph::Capture(stream, [&] { return decode(step, size); });
  };
  // The largest first: what the ops allocate for it is enough for the others.
  for (auto size = sizes.rbegin(); size != sizes.rend(); ++size) {
    ISOBIT_ASSIGN_OR_RETURN(cuda::CapturedGraph captured, capture(*size, cuda::Sharing::kNever));
    Graph graph = {*size, std::move(captured), std::nullopt};
    if (share && *size >= kLeastSharingSize) {
      ISOBIT_ASSIGN_OR_RETURN(graph.sharing, capture(*size, cuda::Sharing::kAlways));
    }
    graphs_.emplace(*size, std::move(graph));
  }
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
  return absl::OkStatus();
}

const StepGraphs::Graph* StepGraphs::Find(const ModelStep& step) const {
  const size_t rows = step.batch.ids.size();
  if (rows != step.batch.sequences.size() || rows != step.requests.size()) return nullptr;
  if (step.batch.writes_past) return nullptr;  // a graph's attention reads the past early
  const auto graph = graphs_.lower_bound(static_cast<int64_t>(rows));
  return graph == graphs_.end() ? nullptr : &graph->second;
}

}  // namespace isobit
