// C7: log-softmax over a vocabulary divided into 8 ranges, with integer sums, so that their order
// does not matter.
//
// A token's weight is exp(z - range maximum), truncated to 40 fraction bits. Integers add exactly,
// so a kernel may sum a range in any order. The 8 ranges are combined in C4's tree. A logit of -inf
// marks a token that was filtered out.
#ifndef ISOBIT_KERNELS_CONTRACT_LOG_PROB_H_
#define ISOBIT_KERNELS_CONTRACT_LOG_PROB_H_

#include <cstdint>

#include "kernels/contract/attention.h"
#include "kernels/contract/constants.h"
#include "kernels/contract/exp_log.h"
#include "kernels/contract/portable.h"

namespace isobit::contract {

// exp(z - max) in fp32, for z <= max.
ISOBIT_HD float ExpDistance(float z, float max) { return Exp2(Mul(Sub(z, max), kLog2E)); }

// The same as an integer multiple of 2^-40. In [0, 2^40].
ISOBIT_HD int64_t TokenWeight(float z, float max) {
  return static_cast<int64_t>(Mul(ExpDistance(z, max), 0x1p40f));
}

// A token's contribution to the entropy, weight x distance, as an integer multiple of 2^-40. In
// [-2^40, 0].
ISOBIT_HD int64_t TokenWeightedDistance(float z, float max) {
  const float weight = ExpDistance(z, max);
  return weight > 0.0f ? static_cast<int64_t>(Mul(Mul(weight, Sub(z, max)), 0x1p40f)) : 0;
}

// Maximum, sum of weights, and sum of weight x distance over one or more ranges of the vocabulary.
// If max is -inf, the ranges have no token left.
struct VocabSum {
  float max = kMinusInfinity;
  float sum = 0.0f;
  float weighted_distance = 0.0f;
};

ISOBIT_HD VocabSum RangeSum(float max, int64_t weights, int64_t weighted_distances) {
  return {max, Mul(static_cast<float>(weights), 0x1p-40f),
          Mul(static_cast<float>(weighted_distances), 0x1p-40f)};
}

ISOBIT_HD VocabSum Combine(const VocabSum& a, const VocabSum& b) {
  if (a.max == kMinusInfinity) return b;
  if (b.max == kMinusInfinity) return a;
  const float max = Max(a.max, b.max);
  const float fa = ExpDistance(a.max, max);
  const float fb = ExpDistance(b.max, max);
  // sum of w*(z - max) = f * (sum of w*(z - own max) + (own max - max) * sum of w)
  const float da = Mul(Fma(Sub(a.max, max), a.sum, a.weighted_distance), fa);
  const float db = Mul(Fma(Sub(b.max, max), b.sum, b.weighted_distance), fb);
  return {max, Add(Mul(a.sum, fa), Mul(b.sum, fb)), Add(da, db)};
}

ISOBIT_HD VocabSum CombineRanges(const VocabSum* r) {
  return Combine(Combine(Combine(r[0], r[1]), Combine(r[2], r[3])),
                 Combine(Combine(r[4], r[5]), Combine(r[6], r[7])));
}

ISOBIT_HD float LogProb(float z, const VocabSum& all) { return Sub(Sub(z, all.max), Log(all.sum)); }

// In nats.
ISOBIT_HD float Entropy(const VocabSum& all) {
  return Sub(Log(all.sum), Div(all.weighted_distance, all.sum));
}

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_LOG_PROB_H_
