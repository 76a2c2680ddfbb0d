// The op interface: one op = one struct of arguments + one function. Not here: how or where an op
// is computed.
//
// An Ops object is the backend of one tensor-parallel rank, chosen once: the CPU backend
// (kernels/cpu), its scalar definition (kernels/oracle) or CUDA (kernels/cuda). Every backend gives
// the same bits in mode kTree. Pointers are raw and belong to the caller; matrices are row-major
// with a leading dimension in elements; bf16 is its bit pattern in uint16_t. Ops do not check again
// what the model has already checked; a failed launch returns its error.
#ifndef ISOBIT_KERNELS_OPS_H_
#define ISOBIT_KERNELS_OPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/log_prob.h"
#include "kernels/contract/portable.h"
#include "kernels/device.h"
#include "kernels/linear_shape.h"
#include "kernels/step_tables.h"
#include "kernels/weight_packer.h"

namespace isobit {

// ---- Linear

struct PartialPush;  // CUDA backend only: kernels/cuda/device/partial_push.cuh

// y[m, n] = round(combine(leaves of x[m, k] . W^T) + bias). bf16_out: y is rounded to bf16.
// fp32_out: y is fp32, for logits and for the partial sum of a row-parallel layer, which covers
// this rank's subtree of the leaves and has no bias. swiglu_out: y, of a gated weight, is rounded
// to bf16, then SwiGLU is applied.
struct LinearArgs {
  const Bf16* x = nullptr;  // [m, k], leading dimension ldx
  int64_t ldx = 0;
  int64_t m = 0;
  LinearWeight weight;
  const float* bias = nullptr;  // [n] or null
  Bf16* bf16_out = nullptr;     // [m, n]: exactly one of the three outputs is set
  float* fp32_out = nullptr;    // [m, n]
  Bf16* swiglu_out = nullptr;   // [m, n / 2]
  int64_t ldy = 0;
  const PartialPush* push = nullptr;  // from AllReduce::Push: takes the sums instead of fp32_out
};

// ---- Row-wise

struct EmbeddingArgs {
  const int32_t* ids = nullptr;  // [rows], each in [0, vocab)
  int64_t rows = 0;
  const Bf16* table = nullptr;  // [vocab, hidden]
  int64_t hidden = 0;
  Bf16* out = nullptr;  // [rows, hidden]
};

// residual = residual + bf16(sum + bias), if sum is set; then out = RMSNorm(residual) * weight.
struct RmsNormArgs {
  Bf16* residual = nullptr;     // [rows, hidden]; read, and also written if sum is set
  const float* sum = nullptr;   // [rows, hidden] fp32, the all-reduced row-parallel result, or null
  const float* bias = nullptr;  // [hidden] or null
  const Bf16* weight = nullptr;  // [hidden]
  Bf16* out = nullptr;           // [rows, hidden]
  int64_t rows = 0;
  int64_t hidden = 0;
  float eps = 0.0f;
};

struct SwiGluArgs {
  const Bf16* gate_up = nullptr;  // [rows, 2 * columns]: gates, then ups
  Bf16* out = nullptr;            // [rows, columns]
  int64_t rows = 0;
  int64_t columns = 0;
};

// ---- Attention

// One layer's paged KV cache on this rank. Position p of a sequence is in its page p / page_size,
// at slot p % page_size.
struct PagedKv {
  Bf16* k = nullptr;  // [num_pages, kv_heads, page_size, head_dim]
  Bf16* v = nullptr;  // likewise
  int32_t page_size = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
};

// Normalises q and k heads (if weights are set), rotates them, and writes k and v into the cache; q
// stays in place.
struct QkvArgs {
  Bf16* qkv = nullptr;  // [rows, (heads + 2 * kv_heads) * head_dim]: q heads, k heads, v heads
  int64_t ld = 0;
  int32_t heads = 0;             // query heads on this rank
  const Bf16* q_norm = nullptr;  // [head_dim] or null
  const Bf16* k_norm = nullptr;  // [head_dim] or null
  float eps = 0.0f;
  const float* cosine = nullptr;  // [max_positions, head_dim / 2]
  const float* sine = nullptr;    // likewise
  SequenceTable sequences;
  PagedKv kv;
};

// out[row, head] = softmax(q k^T / sqrt(head_dim)) v over the keys that the row sees
// (contract/attention.h).
struct AttentionArgs {
  const Bf16* q = nullptr;  // [rows, heads * head_dim], leading dimension ldq
  int64_t ldq = 0;
  int32_t heads =
      0;  // a multiple of kv.kv_heads; query head h reads KV head h / (heads / kv_heads)
  SequenceTable sequences;
  PagedKv kv;
  float scale = 0.0f;   // contract::AttentionScale(head_dim)
  int64_t window = 0;   // how many keys a query sees, including its own; 0: all
  Bf16* out = nullptr;  // [rows, heads * head_dim]
  int64_t ldo = 0;
};

// A copy of one page to another, in every layer's cache.
struct PageCopy {
  int32_t from = 0;
  int32_t to = 0;
};

// Page `to` = page `from`, in all planes, for each copy in order. A plane is one layer's keys, or
// its values: [num_pages, page_elements].
struct CopyPagesArgs {
  Bf16* planes = nullptr;  // the first plane
  int64_t num_planes = 0;
  int64_t plane_stride = 0;           // elements from one plane to the next
  int64_t page_elements = 0;          // elements of a page in a plane
  absl::Span<const PageCopy> copies;  // in host memory that may be reused on return
};

// ---- Cross-rank sums

// out[i] = the sum of W ranks' partials in tree order (C4).
struct ReduceArgs {
  const float* const* partials = nullptr;  // [W] pointers to [count] fp32
  int num_ranks = 0;
  int64_t begin = 0;  // elements [begin, end) are written
  int64_t end = 0;
  int64_t count = 0;  // of the whole message; a ring's order depends on it (contrast modes)
  float* out = nullptr;
};

// ---- Logprobs and sampling

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

struct LogProbArgs {
  const float* logits = nullptr;             // [num_rows, vocab]
  int64_t ld = 0;                            // leading dimension of logits
  const LogProbRequest* requests = nullptr;  // [num_rows]; host memory, with all that it points to
  LogProbResult* results = nullptr;          // [num_rows], host memory
  int64_t num_rows = 0;
  int64_t vocab = 0;
};

// ---- The ops

class Ops {
 public:
  virtual ~Ops() = default;
  virtual const char* name() const = 0;  // e.g. "cpu/avx512"

  // Pointers in op arguments are to this device's memory, unless the argument says host. Ops and
  // the device's copies run in the order in which they are called.
  virtual Device& device() = 0;
  // Makes steps ready for the ops.
  virtual StepTables& tables() = 0;
  // The memory layout in which the ops read weights.
  virtual const WeightPacker& packer() const = 0;

  virtual absl::Status Linear(const LinearArgs& args) = 0;
  virtual absl::Status Embedding(const EmbeddingArgs& args) = 0;
  virtual absl::Status RmsNorm(const RmsNormArgs& args) = 0;
  virtual absl::Status SwiGlu(const SwiGluArgs& args) = 0;
  virtual absl::Status Qkv(const QkvArgs& args) = 0;
  virtual absl::Status Attention(const AttentionArgs& args) = 0;
  virtual absl::Status CopyPages(const CopyPagesArgs& args) = 0;
  virtual absl::Status Reduce(const ReduceArgs& args) = 0;
  virtual absl::Status LogProbs(const LogProbArgs& args) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_H_
