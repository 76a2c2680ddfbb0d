// C3 and C4: how a dot product is divided into 8 leaves, how their sums are combined, and which
// leaves a tensor-parallel rank has.
#ifndef ISOBIT_KERNELS_CONTRACT_LEAF_PLAN_H_
#define ISOBIT_KERNELS_CONTRACT_LEAF_PLAN_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/contract/portable.h"

namespace isobit::contract {

// How the sums of a layer's leaves are combined, in fp32, rounding to nearest even.
enum class LeafSum : int32_t {
  kChain = 0,  // ((((((s0+s1)+s2)+s3)+s4)+s5)+s6)+s7: qkv, gate_up, lm_head
  kTree = 1,   // ((s0+s1)+(s2+s3))+((s4+s5)+(s6+s7)): o_proj, down_proj; its top levels are the
               // all-reduce
};

// Leaf l has columns [bounds[l], bounds[l+1]).
struct LeafPlan {
  std::array<int64_t, kLeaves + 1> bounds;
};

// Divides `count` units into 8 leaves: leaf l has units [l*count/8, (l+1)*count/8). The sum of an
// empty leaf is +0. unit: columns in a unit. total: all columns (the last unit may be incomplete).
inline LeafPlan PlanLeaves(int64_t total, int64_t unit) {
  const int64_t count = (total + unit - 1) / unit;
  LeafPlan plan;
  for (int64_t l = 0; l <= kLeaves; ++l) {
    const int64_t bound = l * count / kLeaves * unit;
    plan.bounds[static_cast<size_t>(l)] = bound < total ? bound : total;
  }
  return plan;
}

// The leaves of an ordinary K, the intermediate size or the vocabulary: units of 16 columns.
inline LeafPlan PlanColumns(int64_t columns) { return PlanLeaves(columns, kLeafUnit); }

// The leaves of the attention output projection. A unit is a KV head: its query heads x head_dim.
inline LeafPlan PlanKvHeads(int64_t kv_heads, int64_t columns_per_kv) {
  return PlanLeaves(kv_heads * columns_per_kv, columns_per_kv);
}

// C4: rank `rank` of `size` (1, 2, 4 or 8) has leaves [begin, end).
struct LeafRange {
  int begin;
  int end;
};
inline LeafRange LeavesOfRank(int rank, int size) {
  return {kLeaves * rank / size, kLeaves * (rank + 1) / size};
}

// The balanced tree over n = 1, 2, 4 or 8 sums: a rank's own subtree, the all-reduce over ranks, or
// the whole tree of C3.
ISOBIT_HD float TreeOf(const float* s, int n) {
  if (n == 1) return s[0];
  if (n == 2) return Add(s[0], s[1]);
  if (n == 4) return Add(Add(s[0], s[1]), Add(s[2], s[3]));
  return Add(Add(Add(s[0], s[1]), Add(s[2], s[3])), Add(Add(s[4], s[5]), Add(s[6], s[7])));
}

ISOBIT_HD float ChainOf(const float* s, int n) {
  float sum = s[0];
  for (int i = 1; i < n; ++i) sum = Add(sum, s[i]);
  return sum;
}

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_LEAF_PLAN_H_
