// Softmax attention: over a paged cache (serving), over whole sequences (training), its gradient.
#ifndef ISOBIT_KERNELS_OPS_ATTENTION_H_
#define ISOBIT_KERNELS_OPS_ATTENTION_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/contract/portable.h"
#include "kernels/ops/paged_kv.h"
#include "kernels/ops/sequences.h"

namespace isobit {

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

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_ATTENTION_H_
