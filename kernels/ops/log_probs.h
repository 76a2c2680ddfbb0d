// Logprobs and draws from rows of logits (serving); logprobs of given tokens (training), and their
// gradient.
#ifndef ISOBIT_KERNELS_OPS_LOG_PROBS_H_
#define ISOBIT_KERNELS_OPS_LOG_PROBS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/portable.h"

namespace isobit {

struct TokenCount {
  int32_t id = 0;
  int32_t in_output = 0;  // occurrences among the sequence's completion tokens so far
  bool in_prompt = false;
};
struct TokenBias {
  int32_t id = 0;
  float bias = 0.0f;
};

// How a row of logits becomes a distribution and a token, in the order of C8. The defaults are
// plain sampling from softmax(logits).
struct RowSampling {
  float temperature = 1.0f;  // 0: greedy, with the distribution of temperature 1 and no filters
  int32_t top_k = 0;         // 0: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  absl::Span<const TokenCount> counts;  // for the penalties; each id once
  absl::Span<const TokenBias> biases;   // each id once
  absl::Span<const int32_t> banned;     // ids that may not be drawn (min_tokens)
  uint64_t seed = 0;
  uint32_t sample = 0;
  uint32_t position = 0;  // absolute position of the token to be drawn
};

struct TokenLogProb {
  int32_t id = 0;
  float logprob = 0.0f;
};

// What to compute from one row of logits.
struct LogProbRequest {
  RowSampling sampling;
  int32_t target = -1;  // >= 0: score this id; -1: draw an id
  bool raw = false;     // logprobs of the unprocessed logits at temperature 1
  int32_t top_logprobs = 0;
  bool want_entropy = false;
};

// The results of one row.
struct LogProbResult {
  TokenLogProb token;  // the drawn or scored id; -inf for a scored id that the filters exclude
  // [top_logprobs], by descending logprob, ties by lowest id; unused entries have id -1.
  std::vector<TokenLogProb> top;
  float entropy = 0.0f;  // nats, if wanted
  bool finite = true;    // false: a logit is NaN or +-inf, and the other results are unset
};

struct LogProbsArgs {
  const float* logits = nullptr;             // [num_rows, vocab]
  int64_t ld = 0;                            // leading dimension of logits
  const LogProbRequest* requests = nullptr;  // [num_rows]; host memory, with all that it points to
  LogProbResult* results = nullptr;          // [num_rows], host memory
  int64_t num_rows = 0;
  int64_t vocab = 0;
};

// How the logprobs of a pass's rows are computed, one element per row. Null: the value in brackets.
struct TrainingSampling {
  const float* temperature = nullptr;  // (1); 0 means 1 without filters
  const int32_t* top_k = nullptr;      // (0: all)
  const float* top_p = nullptr;        // (1)
  const float* min_p = nullptr;        // (0)
};

// A row's distribution: what its gradient needs in addition to the logits.
struct LogProbRow {
  contract::RowDistribution sum;
  // The last token in C8's order whose z is above -inf after the filters. -1: all tokens are.
  float last_z = 0.0f;
  int32_t last_id = -1;
  int32_t finite = 0;  // 0: the row fails (C8, step 5), and all else is unset
};

struct TrainingLogProbsArgs {
  const float* logits = nullptr;  // [rows, vocab]
  int64_t rows = 0;
  int64_t vocab = 0;
  const int32_t* targets = nullptr;  // [rows]
  TrainingSampling sampling;
  float* logprobs = nullptr;    // [rows]; NaN for a row that fails
  float* entropies = nullptr;   // [rows] or null; likewise
  LogProbRow* state = nullptr;  // [rows]
};

struct LogProbGradientArgs {
  const float* logits = nullptr;  // [rows, vocab]
  int64_t rows = 0;
  int64_t vocab = 0;
  const int32_t* targets = nullptr;  // [rows]
  TrainingSampling sampling;
  const LogProbRow* state = nullptr;  // [rows], of the forward pass
  const float* dlogprobs = nullptr;   // [rows]
  const float* dentropies = nullptr;  // [rows] or null: +0
  Bf16* dlogits = nullptr;            // [rows, vocab]; NaN in a row that fails
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_LOG_PROBS_H_
