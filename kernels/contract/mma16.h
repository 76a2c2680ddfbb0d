// C1: one k16 step of the Hopper bf16 tensor core, as integer arithmetic. Every matrix product and
// attention kernel follows this definition.
#ifndef ISOBIT_KERNELS_CONTRACT_MMA16_H_
#define ISOBIT_KERNELS_CONTRACT_MMA16_H_

#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/contract/portable.h"

namespace isobit::contract {

// One of the step's terms, a product or c: magnitude * 2^(exponent - 23), negated if `negative`. A
// subnormal is not normalised: it has exponent -126 and no hidden bit.
struct MmaTerm {
  int64_t magnitude;
  int32_t exponent;
  bool negative;
};

ISOBIT_HD int ExponentField(uint32_t fp32_bits) {
  return static_cast<int>((fp32_bits >> 23) & 0xffu);
}

ISOBIT_HD MmaTerm TermOf(float c) {
  const uint32_t bits = BitsOf(c);
  const int field = ExponentField(bits);
  return {static_cast<int64_t>((bits & 0x7fffffu) | (field != 0 ? 0x800000u : 0u)),
          (field != 0 ? field : 1) - 127, (bits >> 31) != 0};
}

ISOBIT_HD MmaTerm TermOf(Bf16 a, Bf16 b) {
  const MmaTerm x = TermOf(Bf16ToFloat(a));
  const MmaTerm y = TermOf(Bf16ToFloat(b));
  return {(x.magnitude >> 16) * (y.magnitude >> 16) << 9, x.exponent + y.exponent,
          x.negative != y.negative};
}

// The step's result if an operand is NaN or infinite. NaN (always 0x7fffffff) if an operand is NaN,
// if an infinity is multiplied by a zero, or if infinities of both signs are among the 17 terms;
// otherwise the infinity that occurs.
ISOBIT_HD float NonFiniteMma16(float c, const Bf16* a, const Bf16* b) {
  bool nan = c != c;
  bool positive = BitsOf(c) == 0x7f800000u;
  bool negative = BitsOf(c) == 0xff800000u;
  for (int k = 0; k < kMmaK; ++k) {
    const float product = Mul(Bf16ToFloat(a[k]), Bf16ToFloat(b[k]));
    const bool infinite =
        (a[k] & 0x7f80) == 0x7f80 || (b[k] & 0x7f80) == 0x7f80;  // not a finite product's overflow
    nan = nan || product != product;
    positive = positive || (infinite && product > 0.0f);
    negative = negative || (infinite && product < 0.0f);
  }
  if (nan || (positive && negative)) return FromBits(0x7fffffffu);
  return FromBits(positive ? 0x7f800000u : 0xff800000u);
}

// c + sum of a[k] * b[k], k = 0..15, in the tensor core's arithmetic, for every input. E is the
// largest exponent of the non-zero terms, at least -133; zero terms do not count (0 * big does not
// raise E). Every term is truncated toward zero to a multiple of 2^(E-25). The 17 terms are added
// exactly. The sum is truncated toward zero to fp32, subnormals kept. A zero is always +0; a
// magnitude of 2^128 or more becomes an infinity. Measured on an H200 (2026-11-21): 0 mismatches in
// 5,052,928 steps of wgmma and mma.sync.
ISOBIT_HD float Mma16(float c, const Bf16* a, const Bf16* b) {
  const MmaTerm acc = TermOf(c);
  bool finite = acc.exponent < 128;
  int32_t top = kMmaMinExponent;
  if (acc.magnitude != 0 && acc.exponent > top) top = acc.exponent;
  for (int k = 0; k < kMmaK; ++k) {
    finite = finite && (a[k] & 0x7f80) != 0x7f80 && (b[k] & 0x7f80) != 0x7f80;
    const MmaTerm term = TermOf(a[k], b[k]);
    if (term.magnitude != 0 && term.exponent > top) top = term.exponent;
  }
  if (!finite) return NonFiniteMma16(c, a, b);

  int64_t sum = 0;  // in units of 2^(top - 25)
  for (int k = 0; k <= kMmaK; ++k) {
    const MmaTerm term = k < kMmaK ? TermOf(a[k], b[k]) : acc;
    if (term.magnitude == 0) continue;
    const int distance = top - term.exponent;
    const int64_t units =
        distance < 63 ? (term.magnitude << (kMmaFractionBits - 23)) >> distance : 0;
    sum += term.negative ? -units : units;
  }
  if (sum == 0) return 0.0f;

  const uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  const int unit = top - kMmaFractionBits;
  const int leading = unit + 63 - __builtin_clzll(magnitude);
  const int exponent = leading > -126 ? leading : -126;
  const int shift = exponent - 23 - unit;  // drops the bits below the result's last bit
  const uint64_t mantissa =
      shift >= 0 ? magnitude >> (shift < 63 ? shift : 63) : magnitude << -shift;
  if (mantissa == 0) return 0.0f;
  // The hidden bit, if there is one, carries into the exponent field.
  const uint32_t bits = exponent > 127 ? 0x7f800000u
                                       : (static_cast<uint32_t>(exponent + 126) << 23) +
                                             static_cast<uint32_t>(mantissa);
  return FromBits(sum < 0 ? bits | 0x80000000u : bits);
}

// C2: the dot product of n columns: a chain of k16 steps, starting from c, in ascending order of
// columns. An incomplete last step is padded with +0.
ISOBIT_HD float DotChain(float c, const Bf16* a, const Bf16* b, int64_t n) {
  int64_t k = 0;
  for (; k + kMmaK <= n; k += kMmaK) c = Mma16(c, a + k, b + k);
  if (k < n) {
    Bf16 pa[kMmaK] = {};
    Bf16 pb[kMmaK] = {};
    for (int j = 0; j < kMmaK; ++j) {
      if (k + j >= n) break;
      pa[j] = a[k + j];
      pb[j] = b[k + j];
    }
    c = Mma16(c, pa, pb);
  }
  return c;
}

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_MMA16_H_
