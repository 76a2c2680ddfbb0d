// How the q, k and v heads of training's rows are divided among warps: a warp has one group of
// heads, all of one kind.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_ROWS_TRAINING_HEADS_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_ROWS_TRAINING_HEADS_CUH_

#include <cstdint>

#include "common/base/round_up.h"
#include "kernels/cuda/common/rows/heads.cuh"
#include "kernels/ops/qkv.h"

namespace isobit::cuda {

enum class HeadKind { kQuery, kKey, kValue };

struct HeadGroup {
  HeadKind kind;
  int first;       // index among the heads of its kind
  int heads;       // all heads of its kind
  int64_t in_qkv;  // offset of its kind's head 0 in a row of qkv
};

// The groups of a row: those of q, then k, then v.
struct HeadGroups {
  int heads;
  int kv_heads;
  int head_dim;
  int size;  // heads of a group
  int query_groups;
  int kv_groups;  // of k; v has as many

  HeadGroups(const TrainingQkvArgs& a, int size)
      : heads(a.heads),
        kv_heads(a.kv_heads),
        head_dim(a.head_dim),
        size(size),
        query_groups(CeilDiv(a.heads, size)),
        kv_groups(CeilDiv(a.kv_heads, size)) {}

  int count() const { return query_groups + 2 * kv_groups; }
#if defined(__CUDACC__)
  __device__ __forceinline__ HeadGroup Of(int group) const {
    if (group < query_groups) return {HeadKind::kQuery, group * size, heads, 0};
    group -= query_groups;
    if (group < kv_groups) {
      return {HeadKind::kKey, group * size, kv_heads, int64_t{heads} * head_dim};
    }
    return {HeadKind::kValue, (group - kv_groups) * size, kv_heads,
            int64_t{heads + kv_heads} * head_dim};
  }
#endif
};

// Of the arrays of q, k and v, the one of this kind.
template <typename T>
__device__ __forceinline__ T* OfKind(HeadKind kind, T* q, T* k, T* v) {
  return kind == HeadKind::kQuery ? q : kind == HeadKind::kKey ? k : v;
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_ROWS_TRAINING_HEADS_CUH_
