// The ops of training: the forward ops on tensors as a trainer holds them (weights row-major, whole
// sequences, no cache), with the bits of ops.h; their gradients; the optimizer (NUMERICS.md, C10 to
// C15). One op = one struct of arguments + one function.
//
// Every backend gives the same bits. Pointers are to the backend's memory unless they say host;
// matrices are row-major with a leading dimension in elements; bf16 is its bit pattern in uint16_t.
// The caller checks shapes; a failed launch returns its error.
#ifndef ISOBIT_KERNELS_TRAINING_OPS_H_
#define ISOBIT_KERNELS_TRAINING_OPS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/losses.h"
#include "kernels/contract/portable.h"
#include "kernels/ops.h"
#include "kernels/stored_weights.h"

namespace isobit {

// The packs of a pass over token rows: pack i is rows [bounds[i], bounds[i + 1]). bounds[0] is 0,
// and the last bound is the number of rows. The number of packs is a power of two, at most 64; a
// pack may be empty. Sums of packs are combined in a balanced tree. Host memory.
using PackBounds = absl::Span<const int64_t>;

// ---- Linear layers

// A weight [n, columns] as one to three stacked matrices: q, k and v; or gate and up.
inline constexpr int kMaxParts = 3;
struct StackedWeight {
  int parts = 1;
  const Bf16* data[kMaxParts] = {};  // [rows[i], columns], contiguous
  int64_t rows[kMaxParts] = {};
  int64_t columns = 0;
  int64_t n() const { return rows[0] + rows[1] + rows[2]; }
};

// LinearArgs for such a weight: y = round(combine(leaves of x . W^T) + bias). Exactly one output is
// set. With `residual`, bf16_out is AddResidual(residual, sum, bias).
struct StackedLinearArgs {
  const Bf16* x = nullptr;  // [m, columns], leading dimension ldx
  int64_t ldx = 0;
  int64_t m = 0;
  StackedWeight weight;
  contract::LeafPlan leaves;  // of the columns
  contract::LeafSum sum = contract::LeafSum::kChain;
  const float* bias = nullptr;     // [n] or null
  const Bf16* residual = nullptr;  // [m, n] or null
  Bf16* bf16_out = nullptr;        // [m, n]; may be residual
  float* fp32_out = nullptr;       // [m, n]
};

struct InputGradientArgs {
  const Bf16* dy = nullptr;  // [m, n], leading dimension lddy
  int64_t lddy = 0;
  int64_t m = 0;
  StackedWeight weight;
  Bf16* dx = nullptr;  // [m, columns]
};

// dw[i]: those rows of the weight's gradient that belong to matrix i.
struct WeightGradientArgs {
  const Bf16* dy = nullptr;  // [rows, n], leading dimension lddy
  int64_t lddy = 0;
  const Bf16* x = nullptr;  // [rows, columns], leading dimension ldx
  int64_t ldx = 0;
  PackBounds packs;
  int parts = 1;
  int64_t part_rows[kMaxParts] = {};
  int64_t columns = 0;
  float* dw[kMaxParts] = {};  // [part_rows[i], columns]
  // Only with a single pack: its chain continues from what dw holds. The number of rows before
  // these must have been a multiple of 16.
  bool continues = false;
};

// out[c] = the sum of column c of x over the packs (a bias's gradient).
struct ColumnSumsArgs {
  const Bf16* x = nullptr;  // [rows, columns], leading dimension ldx
  int64_t ldx = 0;
  int64_t columns = 0;
  PackBounds packs;
  float* out = nullptr;  // [columns]
};

// ---- Row functions

struct RmsNormGradientArgs {
  const Bf16* x = nullptr;       // [rows, columns], the norm's input
  const Bf16* weight = nullptr;  // [columns]
  const Bf16* dy = nullptr;      // [rows, columns]
  int64_t columns = 0;
  float eps = 0.0f;
  PackBounds packs;
  Bf16* dx = nullptr;   // [rows, columns]
  float* dw = nullptr;  // [columns]
};

struct SwiGluGradientArgs {
  const Bf16* gate_up = nullptr;  // [rows, 2 * columns]: gates, then ups
  const Bf16* ds = nullptr;       // [rows, columns]
  int64_t rows = 0;
  int64_t columns = 0;
  Bf16* dgate_up = nullptr;  // [rows, 2 * columns]
};

// q, k and v heads of a linear layer's output: q and k normalised (if weights are set) and rotated,
// v copied. A KV head whose v has a value that is not finite gets k = NaN, v = +0 (C6).
struct TrainingQkvArgs {
  const Bf16* qkv = nullptr;  // [rows, (heads + 2 * kv_heads) * head_dim]
  int64_t rows = 0;
  const int32_t* positions = nullptr;  // [rows]
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  const Bf16* q_norm = nullptr;  // [head_dim] or null
  const Bf16* k_norm = nullptr;  // [head_dim] or null
  float eps = 0.0f;
  const float* cosine = nullptr;  // [max_positions, head_dim / 2]
  const float* sine = nullptr;    // likewise
  Bf16* q = nullptr;              // [rows, heads * head_dim]
  Bf16* k = nullptr;              // [rows, kv_heads * head_dim]
  Bf16* v = nullptr;              // likewise
};

struct QkvGradientArgs {
  TrainingQkvArgs forward;   // without its results; qkv is read only if there are norms
  const Bf16* dq = nullptr;  // [rows, heads * head_dim], of the rotated heads
  const Bf16* dk = nullptr;  // [rows, kv_heads * head_dim]
  const Bf16* dv = nullptr;  // likewise
  PackBounds packs;
  Bf16* dqkv = nullptr;      // as forward.qkv
  float* dq_norm = nullptr;  // [head_dim] or null
  float* dk_norm = nullptr;  // [head_dim] or null
};

// Which token rows have which id: rows[starts[i]] .. rows[starts[i + 1] - 1], ascending, have
// ids[i]. All are in the backend's memory.
struct EmbeddingRows {
  const int32_t* ids = nullptr;     // [num_ids], each id once
  const int32_t* starts = nullptr;  // [num_ids + 1]
  const int32_t* rows = nullptr;    // [token rows]
  int64_t num_ids = 0;
};
struct EmbeddingGradientArgs {
  const Bf16* dy = nullptr;  // [token rows, hidden]
  int64_t hidden = 0;
  EmbeddingRows table;
  PackBounds packs;
  // lm_head's pack sums for these ids, [packs][num_ids][hidden]; null: +0.
  const float* head_sums = nullptr;
  float* dtable = nullptr;  // [vocab, hidden]; only the rows of `ids` are written
};

// ---- Attention

// Whole sequences in a pass: sequence i is token rows [bounds[i], bounds[i + 1]), with positions
// from 0. After the last, rows without a sequence may follow.
struct PassSequences {
  absl::Span<const int32_t> bounds;        // host
  const int32_t* device_bounds = nullptr;  // the same in the backend's memory
};

struct TrainingAttentionArgs {
  const Bf16* q = nullptr;  // [rows, heads * head_dim], normalised and rotated
  const Bf16* k = nullptr;  // [rows, kv_heads * head_dim], likewise
  const Bf16* v = nullptr;  // [rows, kv_heads * head_dim]
  int64_t rows = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  PassSequences sequences;
  float scale = 0.0f;         // contract::AttentionScale(head_dim)
  int64_t window = 0;         // 0: none
  Bf16* out = nullptr;        // [rows, heads * head_dim]; rows without a sequence become +0
  float* log_sums = nullptr;  // [heads, rows]: L of C13; not written for rows without a sequence
};

struct AttentionGradientArgs {
  TrainingAttentionArgs forward;  // with its results
  const Bf16* dout = nullptr;     // [rows, heads * head_dim]
  Bf16* dq = nullptr;             // [rows, heads * head_dim]; rows without a sequence become +0
  Bf16* dk = nullptr;             // [rows, kv_heads * head_dim], likewise
  Bf16* dv = nullptr;             // likewise
};

// ---- Logprobs

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

struct PolicyLossArgs {
  int64_t tokens = 0;
  const float* logprobs = nullptr;  // [tokens], like all that follow
  const float* advantages = nullptr;
  const float* weights = nullptr;
  const float* old_logprobs = nullptr;        // null: policy gradient; else the clipped loss
  const float* reference_logprobs = nullptr;  // null: no KL term
  float clip_low = 0.2f;                      // at least 0; also clip_high; infinity: no bound
  float clip_high = 0.2f;
  float kl = 0.0f;  // at least 0, finite
  float* values = nullptr;
  float* gradients = nullptr;
};
// INVALID_ARGUMENT: a bound of the clipped loss, or the factor of its KL term, is out of range.
// Every backend's PolicyLoss returns this error.
absl::Status CheckBounds(const PolicyLossArgs& args);

// An elementwise function of which losses are made, and its gradient.
struct LossFunctionArgs {
  contract::LossFunction function = contract::LossFunction::kExp;
  int64_t count = 0;
  const float* x = nullptr;  // [count], like all that follow
  float* values = nullptr;
  float* gradients = nullptr;
};

// sum[0] = C5's tree over x, with one value per leaf.
struct TreeSumArgs {
  const float* x = nullptr;  // [count]
  int64_t count = 0;
  float* sum = nullptr;
};

// sums[i] = C5's tree over x[bounds[i]] .. x[bounds[i + 1] - 1], with one value per leaf. Bounds
// ascend from 0 and are in the backend's memory.
struct SequenceSumsArgs {
  const float* x = nullptr;
  const int32_t* bounds = nullptr;  // [sequences + 1]
  int64_t sequences = 0;
  float* sums = nullptr;  // [sequences]
};

// ---- The optimizer

struct SquareSumsArgs {
  const float* x = nullptr;  // [rows, columns]
  int64_t rows = 0;
  int64_t columns = 0;
  double* sums = nullptr;  // [rows]
};

// sum[0] = the balanced tree over x, which adds adjacent elements first.
struct TreeSum64Args {
  const double* x = nullptr;  // [count]
  int64_t count = 0;
  double* sum = nullptr;
};

struct AdamWArgs {
  int64_t count = 0;
  float* parameter = nullptr;  // [count], the master; like all that follow
  float* m = nullptr;
  float* v = nullptr;
  const float* gradient = nullptr;
  Bf16* working = nullptr;  // bf16(parameter), or null
  contract::AdamWStep step;
};

// A moment of AdamW in its bf16 form (C15).
struct DitherArgs {
  const float* x = nullptr;  // [count]
  int64_t count = 0;
  uint64_t step = 0;
  uint32_t moment = 0;  // 0: m, 1: v
  uint64_t first = 0;   // the index of x[0] in the whole parameter
  Bf16* out = nullptr;  // [count]
};

// Adds the digest sums of a slice of a tensor, whose values are rounded to bf16 (docs/API.md, "The
// weight digest"), to sums[0] and sums[1]; sums[2]: see kWeightSums. part.first_column is a
// multiple of 4, and so is the number of columns unless the slice ends its rows.
struct WeightSumsArgs {
  StoredMatrix from;
  PartOfTensor part;
  uint64_t* sums = nullptr;  // [kWeightSums]
};

// ---- The ops

class TrainingOps {
 public:
  virtual ~TrainingOps() = default;
  virtual const char* name() const = 0;

  virtual absl::Status Embedding(const EmbeddingArgs& args) = 0;
  virtual absl::Status RmsNorm(const RmsNormArgs& args) = 0;
  virtual absl::Status SwiGlu(const SwiGluArgs& args) = 0;
  virtual absl::Status StackedLinear(const StackedLinearArgs& args) = 0;
  virtual absl::Status InputGradient(const InputGradientArgs& args) = 0;
  virtual absl::Status WeightGradient(const WeightGradientArgs& args) = 0;
  virtual absl::Status ColumnSums(const ColumnSumsArgs& args) = 0;
  virtual absl::Status RmsNormGradient(const RmsNormGradientArgs& args) = 0;
  virtual absl::Status SwiGluGradient(const SwiGluGradientArgs& args) = 0;
  virtual absl::Status TrainingQkv(const TrainingQkvArgs& args) = 0;
  virtual absl::Status QkvGradient(const QkvGradientArgs& args) = 0;
  virtual absl::Status EmbeddingGradient(const EmbeddingGradientArgs& args) = 0;
  virtual absl::Status TrainingAttention(const TrainingAttentionArgs& args) = 0;
  virtual absl::Status AttentionGradient(const AttentionGradientArgs& args) = 0;
  virtual absl::Status TrainingLogProbs(const TrainingLogProbsArgs& args) = 0;
  virtual absl::Status LogProbGradient(const LogProbGradientArgs& args) = 0;
  virtual absl::Status PolicyLoss(const PolicyLossArgs& args) = 0;
  virtual absl::Status LossFunction(const LossFunctionArgs& args) = 0;
  virtual absl::Status TreeSum(const TreeSumArgs& args) = 0;
  virtual absl::Status SequenceSums(const SequenceSumsArgs& args) = 0;
  virtual absl::Status SquareSums(const SquareSumsArgs& args) = 0;
  virtual absl::Status TreeSum64(const TreeSum64Args& args) = 0;
  virtual absl::Status AdamW(const AdamWArgs& args) = 0;
  virtual absl::Status Dither(const DitherArgs& args) = 0;
  virtual absl::Status WeightSums(const WeightSumsArgs& args) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_TRAINING_OPS_H_
