// What happens to q, k and v heads between their product and attention: norm, rotation and, in
// serving, the write into the cache; and the gradient.
#ifndef ISOBIT_KERNELS_OPS_QKV_H_
#define ISOBIT_KERNELS_OPS_QKV_H_

#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/ops/packs.h"
#include "kernels/ops/paged_kv.h"
#include "kernels/ops/sequences.h"

namespace isobit {

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

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_QKV_H_
