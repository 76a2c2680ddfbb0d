// C14: losses of tokens, the functions of which other losses are made, and the gradient of each.
//
// INVARIANT: NaN in, NaN out, for value and gradient. A comparison with NaN is false, so every
// select here handles NaN explicitly (tests/kernels/oracle/oracle_losses_test.cc).
#ifndef ISOBIT_KERNELS_CONTRACT_LOSSES_H_
#define ISOBIT_KERNELS_CONTRACT_LOSSES_H_

#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/contract/exp_log.h"
#include "kernels/contract/portable.h"

namespace isobit::contract {

// A function of one number, and its gradient: for instance a token's loss as one of its logprob.
struct ValueAndGradient {
  float value;
  float gradient;
};

ISOBIT_HD float ExpOf(float x) { return Exp2(Mul(x, kLog2E)); }

ISOBIT_HD ValueAndGradient PolicyGradientLoss(float logprob, float advantage) {
  return {-Mul(advantage, logprob), -advantage};
}

// x limited to [low, high], low <= high; NaN stays NaN.
ISOBIT_HD float Clamp(float x, float low, float high) {
  if (x < low) return low;
  return x > high ? high : x;
}

ISOBIT_HD ValueAndGradient ClippedLoss(float logprob, float old_logprob, float advantage,
                                       float clip_low, float clip_high) {
  const float r = ExpOf(Sub(logprob, old_logprob));
  const float u = Mul(r, advantage);
  const float c = Mul(Clamp(r, Sub(1.0f, clip_low), Add(1.0f, clip_high)), advantage);
  if (u <= c) return {-u, -u};
  if (u > c) return {-c, 0.0f};
  const float nan = FromBits(0x7fffffffu);  // u or c is NaN
  return {nan, nan};
}

ISOBIT_HD ValueAndGradient AddReferenceKl(ValueAndGradient loss, float logprob, float reference,
                                          float weight) {
  const float x = Sub(reference, logprob);
  const float e = ExpOf(x);
  return {Add(loss.value, Mul(weight, Sub(Sub(e, x), 1.0f))),
          Add(loss.gradient, Mul(weight, Sub(1.0f, e)))};
}

// The functions of which losses are made, in addition to IEEE operations.
enum class LossFunction : int32_t { kExp, kLog, kSigmoid, kLogSigmoid };

// log(1 + e) for e in [0, 1]. Also accurate for small e, unlike Log(1 + e).
ISOBIT_HD float Log1pOf(float e) { return e <= 0.25f ? LogOfReduced(e, 0.0f) : Log(Add(1.0f, e)); }

ISOBIT_HD ValueAndGradient LogSigmoidOf(float x) {
  const float e = ExpOf(x < 0.0f ? x : -x);
  const float value = Sub(x < 0.0f ? x : 0.0f, Log1pOf(e));
  return {x != x ? x : value, Sigmoid(-x)};
}

ISOBIT_HD ValueAndGradient Evaluate(LossFunction function, float x) {
  switch (function) {
    case LossFunction::kExp: {
      const float e = ExpOf(x);
      return {e, e};
    }
    case LossFunction::kLog: {
      const float value = Log(x);
      return {value, value != value ? value : Div(1.0f, x)};
    }
    case LossFunction::kSigmoid: {
      const float t = Sigmoid(x);
      return {t, Mul(t, Sigmoid(-x))};
    }
    case LossFunction::kLogSigmoid:
      return LogSigmoidOf(x);
  }
  return {};
}

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_LOSSES_H_
