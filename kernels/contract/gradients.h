// C11 to C15: the elementwise functions of gradients and the optimizer; losses are in losses.h. The
// matrix products between them are chains of C1.
#ifndef ISOBIT_KERNELS_CONTRACT_GRADIENTS_H_
#define ISOBIT_KERNELS_CONTRACT_GRADIENTS_H_

#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/contract/exp_log.h"
#include "kernels/contract/noise.h"
#include "kernels/contract/portable.h"

namespace isobit::contract {

// C11: the number of consecutive rows of a pack whose column sums are computed first.
inline constexpr int kColumnSumRows = 64;

// C12: one leaf of a row's dot product, columns in order; an incomplete leaf is filled with +0.
ISOBIT_HD float DotLeaf(const float (&a)[kNormLeaf], const float (&b)[kNormLeaf]) {
  float q = Mul(a[0], b[0]);
  for (int i = 1; i < kNormLeaf; ++i) q = Fma(a[i], b[i], q);
  return q;
}

// RMSNorm. h = x * inverse, g = dy * w, mean = dot / n.
ISOBIT_HD Bf16 NormGradient(float h, float g, float mean, float inverse) {
  return FloatToBf16(Mul(inverse, Fma(-h, mean, g)));
}
// A row's term of the weight's gradient.
ISOBIT_HD float NormWeightTerm(Bf16 dy, Bf16 x, float inverse) {
  return Mul(Bf16ToFloat(dy), Bf16ToFloat(FloatToBf16(Mul(Bf16ToFloat(x), inverse))));
}

// The gradient of a pair before the rotation, from (da, db), that of the rotated pair.
struct RotatedGradient {
  Bf16 first;
  Bf16 second;
};
ISOBIT_HD RotatedGradient RotateGradient(Bf16 da, Bf16 db, float cosine, float sine) {
  const float a = Bf16ToFloat(da);
  const float b = Bf16ToFloat(db);
  return {FloatToBf16(Fma(a, cosine, Mul(b, sine))), FloatToBf16(Fma(b, cosine, -Mul(a, sine)))};
}

struct SwiGluGradient {
  Bf16 gate;
  Bf16 up;
};
ISOBIT_HD SwiGluGradient GradientOfSwiGlu(Bf16 gate, Bf16 up, Bf16 ds) {
  const float g = Bf16ToFloat(gate);
  const float s = Bf16ToFloat(ds);
  const float t = Sigmoid(g);
  const float a = Mul(g, t);
  return {FloatToBf16(Mul(Mul(s, Bf16ToFloat(up)), Fma(a, Sub(1.0f, t), t))),
          FloatToBf16(Mul(s, a))};
}

// C13. 1 / sqrt(head_dim), which scales dQ and dK.
inline float GradientScale(int32_t head_dim) {
  return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(head_dim)));
}
// What the forward pass keeps about a row's softmax, from its folded maximum and sum (C6).
ISOBIT_HD float LogSumExp2(float max, float sum) { return Fma(Log(sum), kLog2E, max); }
// The weight of a key that the row sees; score = q.k.
ISOBIT_HD float AttentionWeight(float score, float scale, float log_sum) {
  return Exp2(Fma(score, scale, -log_sum));
}
ISOBIT_HD Bf16 ScoreGradient(float weight, float value_dot, float output_dot) {
  return FloatToBf16(Mul(weight, Sub(value_dot, output_dot)));
}

// C14. The distribution of a row from which its logprobs were computed.
struct RowDistribution {
  float max = 0.0f;                // of z
  float sum = 0.0f;                // of exp(z - max)
  float weighted_distance = 0.0f;  // of exp(z - max) * (z - max)
};
// The gradient of logit v, which must not be filtered out. dlogprob, dentropy: gradients of the
// row's logprob and entropy. inverse_temperature: 1 for raw logprobs, which changes no bit.
ISOBIT_HD Bf16 LogitGradient(float z, bool is_target, const RowDistribution& row, float dlogprob,
                             float dentropy, float inverse_temperature) {
  const float y = Sub(z, row.max);
  const float p = Mul(Exp2(Mul(y, kLog2E)), Div(1.0f, row.sum));
  const float mean = Div(row.weighted_distance, row.sum);
  float d = Mul(p, Fma(dentropy, Sub(mean, y), -dlogprob));
  if (is_target) d = Add(d, dlogprob);
  return FloatToBf16(Mul(d, inverse_temperature));
}

// C15: one leaf of the sum of squares of a gradient's row; an incomplete one is filled with +0.
ISOBIT_HD double SquareLeaf(const float (&x)[kNormLeaf]) {
  double q = Mul(static_cast<double>(x[0]), static_cast<double>(x[0]));
  for (int i = 1; i < kNormLeaf; ++i) {
    q = Fma(static_cast<double>(x[i]), static_cast<double>(x[i]), q);
  }
  return q;
}

// The factors of one AdamW step.
struct AdamWStep {
  float keep = 1.0f;  // 1 - lr * decay
  float beta1 = 0.0f;
  float one_minus_beta1 = 0.0f;
  float beta2 = 0.0f;
  float one_minus_beta2 = 0.0f;
  float rate = 0.0f;        // lr / (1 - beta1^n)
  float root_scale = 0.0f;  // 1 / sqrt(1 - beta2^n)
  float eps = 0.0f;
  float clip = 1.0f;  // every gradient is multiplied by it first
};
struct AdamWState {
  float parameter;  // fp32 master
  float m;
  float v;
};
ISOBIT_HD AdamWState StepAdamW(AdamWState s, float gradient, const AdamWStep& step) {
  const float g = Mul(gradient, step.clip);
  s.parameter = Mul(s.parameter, step.keep);
  s.m = Add(Mul(step.beta1, s.m), Mul(step.one_minus_beta1, g));
  s.v = Add(Mul(step.beta2, s.v), Mul(step.one_minus_beta2, Mul(g, g)));
  const float root = Add(Mul(Sqrt(s.v), step.root_scale), step.eps);
  s.parameter = Sub(s.parameter, Mul(step.rate, Div(s.m, root)));
  return s;
}

// Rounds x to one of its two bf16 neighbours: up in magnitude for d of the 2^16 values of `noise`,
// d being x's distance from the smaller one in 2^-16 of the gap. A finite x stays finite.
ISOBIT_HD Bf16 DitherBf16(float x, uint32_t noise) {
  const uint32_t bits = BitsOf(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude == 0x7f800000u) return static_cast<Bf16>(bits >> 16);
  const uint32_t rounded = (magnitude + noise) >> 16;
  return static_cast<Bf16>(((bits >> 31) << 15) | (rounded < 0x7f80u ? rounded : 0x7f7fu));
}

// The noise for a parameter's moment at step n >= 1, for its elements 8*counter .. 8*counter + 7.
// moment: 0 for m, 1 for v.
constexpr int kDitherWidth = 8;
ISOBIT_HD PhiloxBlock DitherNoise(uint64_t n, uint32_t moment, uint64_t counter) {
  return Philox(
      n, {{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), moment, 1u}});
}
// The noise of element i; `block` is the block that contains it.
ISOBIT_HD uint32_t DitherOf(const PhiloxBlock& block, uint64_t i) {
  return (block.words[i % kDitherWidth / 2] >> (16 * (i % 2))) & 0xffffu;
}

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_GRADIENTS_H_
