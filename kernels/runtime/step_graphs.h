// CUDA graphs of decode steps, one for each of some batch sizes: a step replays the smallest graph
// that it fits in, and pads itself to that size.
#ifndef ISOBIT_KERNELS_RUNTIME_STEP_GRAPHS_H_
#define ISOBIT_KERNELS_RUNTIME_STEP_GRAPHS_H_

#include <cstdint>
#include <map>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/device/captured_graph.h"
#include "kernels/runtime/rank_executor.h"
#include "kernels/step_tables.h"

namespace isobit {

// The largest decode step that is captured. Launching a larger one op by op costs little beside the
// step itself, and its graph would take memory, and time at the start.
inline constexpr int64_t kMaxGraphSequences = 512;

// The captured batch sizes, ascending; the last is min(max_sequences, kMaxGraphSequences).
std::vector<int64_t> GraphSizes(int64_t max_sequences);

class StepGraphs {
 public:
  struct Graph {
    int64_t size = 0;  // sequences, one row each
    cuda::CapturedGraph captured;
  };

  bool empty() const { return graphs_.empty(); }

  // Captures a graph of each size. `upload` brings the tables of an empty step of that size to the
  // GPU, and `decode` puts that step on `stream`. Each size is run once
  // before it is captured, so that CUDA and the ops take what memory they need. All ranks capture
  // at the same time. Errors of the callbacks and of CUDA.
  absl::Status Capture(const std::vector<int64_t>& sizes, cudaStream_t stream,
                       absl::FunctionRef<absl::StatusOr<UploadedStep>(int64_t size)> upload,
                       absl::FunctionRef<absl::Status(const UploadedStep&, int64_t size)> decode);

  // The smallest graph that the step fits in; null: there is none, not every sequence of the step
  // has one row and one request, or the step writes what its attention may read early.
  const Graph* Find(const ModelStep& step) const;

 private:
  std::map<int64_t, Graph> graphs_;  // by size
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_STEP_GRAPHS_H_
