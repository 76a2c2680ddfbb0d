// CUDA graphs of decode steps, for each of some batch sizes one, and from kLeastSharingSize on a
// second one, whose attention computes what sequences share once. With guesses, also graphs of
// steps in which sequences have several rows, each with a draw. A step replays the smallest graph
// that it fits in, and pads itself to that size.
#ifndef ISOBIT_KERNELS_RUNTIME_STEP_GRAPHS_H_
#define ISOBIT_KERNELS_RUNTIME_STEP_GRAPHS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/device/captured_graph.h"
#include "kernels/cuda/sequences.h"
#include "kernels/runtime/rank_executor.h"
#include "kernels/step_tables.h"

namespace isobit {

// The largest decode step that is captured. Launching a larger one op by op costs little beside the
// step itself, and its graph would take memory, and time at the start.
inline constexpr int64_t kMaxGraphSequences = 512;

// Steps padded to fewer sequences are computed without sharing.
inline constexpr int64_t kLeastSharingSize = 8;

// What a graph's steps are padded to.
struct GraphShape {
  int64_t rows = 0;  // each with a request
  int64_t sequences = 0;
  int32_t rows_of_sequence = 1;  // at most
};

// The captured batch sizes, ascending; the last is min(max_sequences, kMaxGraphSequences).
std::vector<int64_t> GraphSizes(int64_t max_sequences);

// The graphs of steps with up to max_guesses > 0 guesses a sequence, ascending. max_draws: of a
// step.
std::vector<GraphShape> GuessGraphShapes(int64_t max_draws, int max_guesses);

class StepGraphs {
 public:
  struct Graph {
    GraphShape shape;
    cuda::CapturedGraph captured;
    std::optional<cuda::CapturedGraph> sharing;

    // The graph for a step's tables.
    const cuda::CapturedGraph& For(const UploadedStep& step) const {
      return sharing.has_value() && step.sequences.device->shares ? *sharing : captured;
    }
  };

  bool empty() const { return graphs_.empty(); }

  using UploadEmpty =
      absl::FunctionRef<absl::StatusOr<UploadedStep>(const GraphShape&, cuda::Sharing)>;
  using DecodeStep = absl::FunctionRef<absl::Status(const UploadedStep&, int64_t rows)>;

  // Captures the graphs of each size, and of each shape with guesses; `share`: also those that
  // share, without guesses. `upload` brings the tables of an empty step of that shape to the GPU,
  // and `decode` puts that step on `stream`. Each graph's step is run once before it is captured,
  // so that CUDA and the ops take what memory they need. All ranks capture at the same time. Errors
  // of the callbacks and of CUDA.
  absl::Status Capture(const std::vector<int64_t>& sizes, const std::vector<GraphShape>& guesses,
                       bool share, cudaStream_t stream, UploadEmpty upload, DecodeStep decode);

  // The smallest graph that the step fits in; null: there is none, not every row of the step has a
  // request of its own, or the step writes what its attention may read early.
  const Graph* Find(const ModelStep& step) const;

 private:
  const Graph* FindWithGuesses(const ModelStep& step) const;

  std::map<int64_t, Graph> graphs_;  // by size
  std::vector<Graph> with_guesses_;  // the smallest first
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_STEP_GRAPHS_H_
