// The sizes of graphs, their capture, and the search for a step's graph.
#include "kernels/runtime/step_graphs.h"

#include <algorithm>
#include <utility>

#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"

namespace isobit {

namespace {

// Steps with more rows replay no graph: few of them pay (rollout/guesses/guess_table.h), and each
// graph takes memory.
constexpr int64_t kMaxGuessGraphRows = 128;

}  // namespace

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

std::vector<GraphShape> GuessGraphShapes(int64_t max_draws, int max_guesses) {
  std::vector<GraphShape> shapes;
  for (int64_t rows = 8; rows <= std::min(max_draws, kMaxGuessGraphRows); rows += rows < 32 ? 8
                                                                                  : rows < 64
                                                                                      ? 16
                                                                                      : 32) {
    shapes.push_back({rows, rows, 1 + max_guesses});
  }
  return shapes;
}

absl::Status StepGraphs::Capture(const std::vector<int64_t>& sizes,
                                 const std::vector<GraphShape>& guesses, bool share,
                                 cudaStream_t stream, UploadEmpty upload, DecodeStep decode) {
  const auto capture = [&](const GraphShape& shape,
                           cuda::Sharing sharing) -> absl::StatusOr<cuda::CapturedGraph> {
    ISOBIT_ASSIGN_OR_RETURN(const UploadedStep step, upload(shape, sharing));
    ISOBIT_RETURN_IF_ERROR(decode(step, shape.rows));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
    return cuda::CapturedGraph::Capture(stream, [&] { return decode(step, shape.rows); });
  };
  // The largest first: what the ops allocate for it is enough for the others.
  for (auto size = sizes.rbegin(); size != sizes.rend(); ++size) {
    const GraphShape shape = {*size, *size};
    ISOBIT_ASSIGN_OR_RETURN(cuda::CapturedGraph captured, capture(shape, cuda::Sharing::kNever));
    Graph graph = {shape, std::move(captured), std::nullopt};
    if (share && *size >= kLeastSharingSize) {
      ISOBIT_ASSIGN_OR_RETURN(graph.sharing, capture(shape, cuda::Sharing::kAlways));
    }
    graphs_.emplace(*size, std::move(graph));
  }
  for (auto shape = guesses.rbegin(); shape != guesses.rend(); ++shape) {
    ISOBIT_ASSIGN_OR_RETURN(cuda::CapturedGraph captured, capture(*shape, cuda::Sharing::kNever));
    with_guesses_.push_back({*shape, std::move(captured), std::nullopt});
  }
  std::reverse(with_guesses_.begin(), with_guesses_.end());
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
  return absl::OkStatus();
}

const StepGraphs::Graph* StepGraphs::Find(const ModelStep& step) const {
  const size_t rows = step.batch.ids.size();
  if (rows != step.requests.size()) return nullptr;
  if (step.batch.writes_past) return nullptr;  // a graph's attention reads the past early
  if (rows != step.batch.sequences.size()) return FindWithGuesses(step);
  const auto graph = graphs_.lower_bound(static_cast<int64_t>(rows));
  return graph == graphs_.end() ? nullptr : &graph->second;
}

const StepGraphs::Graph* StepGraphs::FindWithGuesses(const ModelStep& step) const {
  int64_t most_rows = 0;
  for (const SequenceRows& s : step.batch.sequences) most_rows = std::max(most_rows, s.num_rows);
  for (size_t i = 0; i < step.logit_rows.size(); ++i) {
    if (step.logit_rows[i] != static_cast<int64_t>(i)) return nullptr;
  }
  const auto fits = [&](const Graph& graph) {
    return std::ssize(step.requests) <= graph.shape.rows &&
           std::ssize(step.batch.sequences) <= graph.shape.sequences &&
           most_rows <= graph.shape.rows_of_sequence;
  };
  const auto graph = std::ranges::find_if(with_guesses_, fits);
  return graph == with_guesses_.end() ? nullptr : &*graph;
}

}  // namespace isobit
