// From logits to logprobs and tokens on the GPU (C7, C8). Every row has its own parameters; input
// and output are in GPU memory.
//
// A row is divided into the 8 ranges of C7. One block takes a range and keeps it in shared memory,
// so logits are read once. Filters and top lists need the order of the row's tokens: such rows run
// as a cluster of 8 blocks. The result of a range is a few numbers (RangeResult in
// vocab_range.cuh), never logits.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_LOG_PROBS_H_
#define ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_LOG_PROBS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/contract/constants.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/log_probs.h"

namespace isobit::cuda {

// The largest vocabulary: an eighth of it must fit into a block's shared memory.
inline constexpr int64_t kMaxDeviceVocab = 8 * 50'000;
// The longest top list.
inline constexpr int32_t kMaxTopLogProbs = 1024;

// An interval of one of the flat arrays of DeviceLogProbs.
struct ListSpan {
  int32_t first = 0;
  int32_t size = 0;
};

// The input of one row: RowSampling and LogProbRequest of kernels/ops/log_probs.h, with lists in
// place of spans.
struct DeviceLogProbRow {
  const float* logits = nullptr;  // [vocab]; null: padding, whose outputs are left unchanged
  uint64_t seed = 0;
  uint32_t sample = 0;
  uint32_t position = 0;
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  ListSpan counts;
  ListSpan biases;
  ListSpan banned;
  int32_t target = -1;
  int32_t top_logprobs = 0;  // at most kMaxTopLogProbs and DeviceLogProbs::top_stride
  bool raw = false;
  bool want_entropy = false;
};

// The output of one row. If the row is not finite, only `finite` is set, and id is 0.
struct DeviceLogProbResult {
  int32_t id = 0;
  float logprob = 0.0f;
  float entropy = 0.0f;  // set only if asked for
  int32_t finite = 0;    // 1 or 0
};

// The output of training's rows (TrainingLogProbsArgs), which all have a target: [num_rows] each.
// NaN for a row that fails.
struct TrainingLogProbOutputs {
  float* logprobs = nullptr;
  float* entropies = nullptr;   // null: not written; yet rows must ask for it, as `state` needs it
  LogProbRow* state = nullptr;  // null: these are not training's rows
};

// All pointers are to GPU memory. A replayed graph reads the arrays' content at that time; only the
// numbers in this struct are fixed.
struct DeviceLogProbs {
  const DeviceLogProbRow* rows = nullptr;  // [num_rows]
  int64_t num_rows = 0;
  int64_t vocab = 0;
  const TokenCount* counts = nullptr;
  const TokenBias* biases = nullptr;
  const int32_t* banned = nullptr;
  DeviceLogProbResult* results = nullptr;  // [num_rows]
  int32_t* ids = nullptr;                  // [num_rows], a second copy of the ids; may be null
  TokenLogProb* top = nullptr;             // row i's list is at top + i * top_stride
  int64_t top_stride = 0;
  TrainingLogProbOutputs training = {};  // with state, `results`, `ids` and `top` are not written
  std::byte* workspace = nullptr;  // LogProbWorkspaceBytes, zeroed once; the next launch of the
                                   // same stream can use it without zeroing
  bool ranked_rows = true;         // false: no row has filters or a top list; saves a launch
};

size_t LogProbWorkspaceBytes(int64_t num_rows);

// Computes every row's token, logprob, entropy and top list. May be captured into a graph.
// INVALID_ARGUMENT: the vocabulary exceeds kMaxDeviceVocab. INTERNAL: CUDA refused a launch.
absl::Status LaunchLogProbs(const DeviceLogProbs& args, const Stream& stream);

// The logits of rows without filters and top lists may be on several GPUs, each with the same
// number of the 8 ranges (contract::PlanColumns). First each GPU sums and draws in its own ranges;
// then any GPU joins the range results of all. RankRanges: the ranges of one GPU.
struct RankRanges {
  int first = 0;
  int count = contract::kLeaves;
};
// The size of the range results, [num_rows][ranges], in bytes.
size_t RangeResultBytes(int64_t num_rows, int num_ranges);
// args.rows[i].logits has only the logits of these ranges. Writes only `results`.
absl::Status LaunchRangeResults(const DeviceLogProbs& args, const RankRanges& ranges,
                                std::byte* results, const Stream& stream);

struct RankRangeResults {
  const std::byte* of_rank[contract::kLeaves] = {};  // memory of this GPU, or memory that it maps
  int num_ranks = 0;
};
// Reads none of args.rows[i].logits. Errors of both functions: those of LaunchLogProbs.
absl::Status LaunchJoinLogProbs(const DeviceLogProbs& args, const RankRangeResults& results,
                                const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_LOG_PROBS_H_
