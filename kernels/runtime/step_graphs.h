// CUDA graphs of decode steps: one for each of several batch sizes, and from kLeastSharingSize on a
// second one, whose attention computes what sequences share only once. With guesses, there are also
// graphs of steps with several rows per sequence, each with a draw. A step is padded to the size of
// the smallest graph into which it fits, and replays that graph.
#ifndef ISOBIT_KERNELS_RUNTIME_STEP_GRAPHS_H_
#define ISOBIT_KERNELS_RUNTIME_STEP_GRAPHS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/common/device/captured_graph.h"
#include "kernels/cuda/common/step_tables/sequences.h"
#include "kernels/runtime/rank_executor.h"
#include "kernels/step_tables.h"

namespace isobit {

// The largest decode step that is captured. Launching a larger one op by op costs little compared
// with the step itself, while its graph would take memory, and time at the start.
inline constexpr int64_t kMaxGraphSequences = 512;

// A step padded to fewer sequences is computed without sharing.
inline constexpr int64_t kLeastSharingSize = 8;

// The shape to which a graph's steps are padded.
struct GraphShape {
  int64_t rows = 0;  // each with a request
  int64_t sequences = 0;
  int32_t rows_of_sequence = 1;  // at most so many
};

// The captured batch sizes, ascending. The last one is min(max_sequences, kMaxGraphSequences).
std::vector<int64_t> GraphSizes(int64_t max_sequences);

// The shapes of graphs of steps with up to max_guesses > 0 guesses per sequence, ascending.
// max_draws: bound of the draws in a step.
std::vector<GraphShape> GuessGraphShapes(int64_t max_draws, int max_guesses);

class StepGraphs {
 public:
  struct Graph {
    GraphShape shape;
    cuda::CapturedGraph captured;
    std::optional<cuda::CapturedGraph> sharing;

    // The graph to use for a step's tables.
    const cuda::CapturedGraph& For(const UploadedStep& step) const {
      return sharing.has_value() && step.sequences.device->shares ? *sharing : captured;
    }
  };

  bool empty() const { return graphs_.empty(); }

  using UploadEmpty =
      absl::FunctionRef<absl::StatusOr<UploadedStep>(const GraphShape&, cuda::Sharing)>;
  using DecodeStep = absl::FunctionRef<absl::Status(const UploadedStep&, int64_t rows)>;

  // Captures the graphs of each size, and of each shape with guesses; with `share`, also those that
  // share, but only without guesses. `upload` copies the tables of an empty step of that shape to
  // the GPU, and `decode` launches that step on `stream`. Each graph's step runs once before it is
  // captured, so that CUDA and the ops allocate what they need. All ranks capture at the same time.
  // Errors: those of the callbacks and of CUDA.
  absl::Status Capture(const std::vector<int64_t>& sizes, const std::vector<GraphShape>& guesses,
                       bool share, cudaStream_t stream, UploadEmpty upload, DecodeStep decode);

  // The smallest graph into which the step fits. Null: there is none, a row of the step has no
  // request of its own, or the step writes what its attention may read too early.
  const Graph* Find(const ModelStep& step) const;

 private:
  const Graph* FindWithGuesses(const ModelStep& step) const;

  std::map<int64_t, Graph> graphs_;  // by size
  std::vector<Graph> with_guesses_;  // smallest first
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_STEP_GRAPHS_H_
