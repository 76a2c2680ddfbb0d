// C5: exp2, log and log1p as polynomials in explicit fp32 operations, the same source for CPU and
// GPU.
//
// The coefficients were fitted by linear programming (minimax relative error) and rounded to fp32
// one after the other. tests/kernels/contract/exp_log_test.cc checks the error bounds over the
// whole range of use.
#ifndef ISOBIT_KERNELS_CONTRACT_EXP_LOG_H_
#define ISOBIT_KERNELS_CONTRACT_EXP_LOG_H_

#include <cstdint>

#include "kernels/contract/portable.h"

namespace isobit::contract {

// The coefficient of f^power in Exp2's polynomial, with power in [0, 5].
ISOBIT_HD constexpr float Exp2Coefficient(int power) {
  constexpr float kCoefficients[] = {1.0f,           0x1.62e42ap-1f, 0x1.ebf9c2p-3f,
                                     0x1.c6b6d8p-5f, 0x1.3ce8acp-7f, 0x1.5bda40p-10f};
  return kCoefficients[power];
}

// 2^f for |f| <= 1/2, by that polynomial.
ISOBIT_HD float Exp2OfFraction(float f) {
  float p = Exp2Coefficient(5);
  p = Fma(p, f, Exp2Coefficient(4));
  p = Fma(p, f, Exp2Coefficient(3));
  p = Fma(p, f, Exp2Coefficient(2));
  p = Fma(p, f, Exp2Coefficient(1));
  return Fma(p, f, Exp2Coefficient(0));
}

// 2^x. Relative error below 2^-22.3. exp2(0) is exactly 1. Below -126, and at -inf, exactly +0; at
// 127.5 and above +inf; NaN for NaN.
ISOBIT_HD float Exp2(float x) {
  const float kMagic = 0x1.8p23f;  // adding it leaves round(x) in the low bits
  const float shifted = Add(x, kMagic);
  const float f = Sub(x, Sub(shifted, kMagic));  // exact, |f| <= 1/2
  const float scale = FromBits((BitsOf(shifted) - BitsOf(kMagic) + 127u) << 23);
  const float result = Mul(Exp2OfFraction(f), scale);
  if (x < -126.0f) return 0.0f;
  return x >= 127.5f ? kInfinity : result;
}

// log(1 + f) + e * ln 2 for f in [sqrt(1/2) - 1, sqrt(2) - 1] and a whole number e.
ISOBIT_HD float LogOfReduced(float f, float e) {
  float p = -0x1.38b590p-4f;
  p = Fma(p, f, 0x1.055b6cp-3f);
  p = Fma(p, f, -0x1.0d8540p-3f);
  p = Fma(p, f, 0x1.22da1cp-3f);
  p = Fma(p, f, -0x1.547244p-3f);
  p = Fma(p, f, 0x1.99a008p-3f);
  p = Fma(p, f, -0x1.000226p-2f);
  p = Fma(p, f, 0x1.555554p-2f);
  const float square = Mul(f, f);
  float r = Mul(Mul(square, f), p);
  r = Fma(e, -0x1.bd0106p-13f,
          r);  // ln 2 = 0.693359375 - 2.12194440e-4; the first term needs few bits
  r = Fma(-0.5f, square, r);
  return Fma(e, 0.693359375f, Add(f, r));
}

// The natural logarithm of a positive normal float. log(0) is -inf, log(+inf) is +inf; NaN for
// negative numbers and NaN; a subnormal counts as 0. Relative error below 2^-22.
ISOBIT_HD float Log(float x) {
  if (x == kInfinity) return x;
  if (!(x >= 0.0f)) return FromBits(0x7fffffffu);
  if (x < 0x1p-126f) return kMinusInfinity;
  const uint32_t kSqrtHalf = 0x3f3504f3u;
  const uint32_t offset = BitsOf(x) - kSqrtHalf;
  const int32_t e = static_cast<int32_t>(offset) >> 23;
  const float m = FromBits((offset & 0x7fffffu) + kSqrtHalf);  // in [sqrt(1/2), sqrt(2))
  return LogOfReduced(Sub(m, 1.0f), static_cast<float>(e));
}

// log(1 - u) for u in [0, 1). Also accurate for small u, unlike Log(1 - u).
ISOBIT_HD float Log1mOf(float u) {
  const float near_zero = LogOfReduced(-u, 0.0f);
  const float beyond = Log(Sub(1.0f, u));
  return u <= 0.25f ? near_zero : beyond;  // computes both, since a select of values vectorises
}

// 1 / (1 + exp(-x)), the logistic function of SwiGLU.
ISOBIT_HD float Sigmoid(float x) { return Div(1.0f, Add(1.0f, Exp2(Mul(x, -0x1.715476p+0f)))); }

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_EXP_LOG_H_
