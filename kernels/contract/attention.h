// C6: how attention processes a tile of scores and combines finished splits. The matrix products
// around these are chains of C1.
//
// One query row sees keys in splits of kSplit absolute positions, each divided into tiles of
// KvTile(head_dim). A split starts from SoftmaxRow{} and is computed alone; finished splits are
// folded left to right. A tile or split without a key that the row sees is skipped; that changes no
// bit.
#ifndef ISOBIT_KERNELS_CONTRACT_ATTENTION_H_
#define ISOBIT_KERNELS_CONTRACT_ATTENTION_H_

#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/contract/exp_log.h"
#include "kernels/contract/portable.h"

namespace isobit::contract {

// log2(e) / sqrt(head_dim), computed in float64 (division and square root are IEEE operations) and
// rounded once to fp32.
inline float AttentionScale(int32_t head_dim) {
  return static_cast<float>(0x1.71547652b82fep+0 / __builtin_sqrt(static_cast<double>(head_dim)));
}

// Whether the query at absolute position `query` sees the key at `key`. window = 0: no sliding
// window.
ISOBIT_HD bool Sees(int64_t query, int64_t key, int64_t window) {
  return key <= query && (window == 0 || key > query - window);
}

// The running state of one row in one split, except its accumulator (head_dim values).
struct SoftmaxRow {
  float max = kMinusInfinity;  // of the raw scores q.k
  float lanes[kRowSumLanes] =
      {};  // lane r sums the weights of keys r, r + 8, r + 16, ... of each tile
};

// One online-softmax update: from a tile's raw scores (unseen keys -inf; at least one seen) to its
// weights. scale = log2(e) / sqrt(head_dim), rounded to fp32. Leaves the fp32 weight of key j in
// scores[j]. Returns alpha; the caller multiplies the accumulator by it before adding the tile's
// products.
ISOBIT_HD float UpdateSoftmax(SoftmaxRow& row, float* scores, int n, float scale) {
  float max = row.max;
  for (int j = 0; j < n; ++j) max = Max(max, scores[j]);
  const float shift = Mul(max, scale);
  const float alpha = Exp2(Sub(Mul(row.max, scale), shift));
  for (int r = 0; r < kRowSumLanes; ++r) row.lanes[r] = Mul(row.lanes[r], alpha);
  for (int j = 0; j < n; ++j) {
    scores[j] = Exp2(Fma(scores[j], scale, -shift));
    row.lanes[j % kRowSumLanes] = Add(row.lanes[j % kRowSumLanes], scores[j]);
  }
  row.max = max;
  return alpha;
}

// The result of a split: the scaled maximum and the row sum. FoldAccumulator folds the split's
// accumulator.
struct SplitSum {
  float max;  // row maximum x scale; -inf: the row has seen no key
  float sum;
};
ISOBIT_HD SplitSum FinishSplit(const SoftmaxRow& row, float scale) {
  const float* s = row.lanes;
  return {Mul(row.max, scale),
          Add(Add(Add(s[0], s[1]), Add(s[2], s[3])), Add(Add(s[4], s[5]), Add(s[6], s[7])))};
}
// Folds split b into the running a: sums and accumulators become x_a * left + x_b * right (two
// products, one addition).
struct FoldFactors {
  float left;
  float right;
};
ISOBIT_HD FoldFactors Fold(SplitSum& a, const SplitSum& b) {
  const float max = Max(a.max, b.max);
  const FoldFactors f = {Exp2(Sub(a.max, max)), Exp2(Sub(b.max, max))};
  a.sum = Add(Mul(a.sum, f.left), Mul(b.sum, f.right));
  a.max = max;
  return f;
}
ISOBIT_HD float FoldAccumulator(float a, float b, const FoldFactors& f) {
  return Add(Mul(a, f.left), Mul(b, f.right));
}

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_ATTENTION_H_
