// C5: the row-wise functions between the matrix products: RMSNorm's sum of squares, SwiGLU and the
// rotary rotation.
#ifndef ISOBIT_KERNELS_CONTRACT_ROW_FUNCTIONS_H_
#define ISOBIT_KERNELS_CONTRACT_ROW_FUNCTIONS_H_

#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/contract/exp_log.h"
#include "kernels/contract/portable.h"

namespace isobit::contract {

// A balanced binary tree over leaves that arrive in ascending order: adjacent pairs are added
// first, and the number of leaves is padded to a power of two with +0. Keeps one pending sum per
// level, like the digits of a binary counter. T: float or double.
template <typename T>
struct BalancedSum {
  T pending[40];
  uint64_t count = 0;

  ISOBIT_HD void Push(T leaf) {
    int level = 0;
    for (uint64_t bits = count; (bits & 1u) != 0; bits >>= 1) leaf = Add(pending[level++], leaf);
    pending[level] = leaf;
    ++count;
  }
  // The pending sums are added from the lowest level up. Padding, if there is any, is added to the
  // lowest one: it turns -0 into +0, and changes nothing further up.
  ISOBIT_HD T Total() const {
    const bool padded = (count & (count - 1)) != 0;
    T total = 0;
    int level = 0;
    for (uint64_t bits = count; bits != 0; bits >>= 1, ++level) {
      if ((bits & 1u) != 0) total = padded ? Add(pending[level], total) : pending[level];
    }
    return total;
  }
};
using TreeSum = BalancedSum<float>;
using TreeSum64 = BalancedSum<double>;

// The sum of squares of x[0..n), n > 0: leaves of four columns (an incomplete last leaf is filled
// with +0), then the tree.
ISOBIT_HD float SumOfSquares(const Bf16* x, int64_t n) {
  TreeSum tree;
  for (int64_t i = 0; i < n; i += kNormLeaf) {
    float leaf = 0.0f;
    for (int64_t j = i; j < i + kNormLeaf; ++j) {
      const float v = j < n ? Bf16ToFloat(x[j]) : 0.0f;
      leaf = j == i ? Mul(v, v) : Fma(v, v, leaf);
    }
    tree.Push(leaf);
  }
  return tree.Total();
}

// 1 / sqrt(mean of squares + eps)
ISOBIT_HD float InverseRms(float sum_of_squares, int64_t n, float eps) {
  return Div(1.0f, Sqrt(Add(Div(sum_of_squares, static_cast<float>(n)), eps)));
}

// One element of RMSNorm, with Hugging Face's roundings: normalised in fp32, rounded to bf16, then
// multiplied by the weight.
ISOBIT_HD Bf16 Normalise(Bf16 x, float inverse_rms, Bf16 weight) {
  const Bf16 unit = FloatToBf16(Mul(Bf16ToFloat(x), inverse_rms));
  return FloatToBf16(Mul(Bf16ToFloat(weight), Bf16ToFloat(unit)));
}

// The residual stream after a row-parallel layer: the layer's sum plus bias is rounded to bf16 and
// added, and the result is rounded again.
ISOBIT_HD Bf16 AddResidual(Bf16 residual, float sum, float bias) {
  const Bf16 delta = FloatToBf16(Add(sum, bias));
  return FloatToBf16(Add(Bf16ToFloat(residual), Bf16ToFloat(delta)));
}

// gate * sigmoid(gate) * up, rounded once. The linear layer has rounded gate and up to bf16.
ISOBIT_HD Bf16 SwiGlu(Bf16 gate, Bf16 up) {
  const float g = Bf16ToFloat(gate);
  return FloatToBf16(Mul(Mul(g, Sigmoid(g)), Bf16ToFloat(up)));
}

// The rotary rotation of the pair (x[i], x[i + head_dim/2]) by one angle, in the layout of Hugging
// Face's rotate_half.
struct Rotated {
  Bf16 first;
  Bf16 second;
};
ISOBIT_HD Rotated Rotate(Bf16 first, Bf16 second, float cosine, float sine) {
  const float a = Bf16ToFloat(first);
  const float b = Bf16ToFloat(second);
  return {FloatToBf16(Fma(a, cosine, -Mul(b, sine))), FloatToBf16(Fma(b, cosine, Mul(a, sine)))};
}

// Whether a bf16 is neither infinite nor NaN. A head with a non-finite value is cached as keys of
// NaN and values of +0. Rows that see the key then fail visibly, and other rows stay finite, since
// 0 * infinity never occurs (C6).
ISOBIT_HD bool IsFinite(Bf16 x) { return (x & 0x7f80) != 0x7f80; }
inline constexpr Bf16 kPoisonedKey = 0x7fff;

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_ROW_FUNCTIONS_H_
