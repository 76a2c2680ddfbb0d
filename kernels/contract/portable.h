// The operations of which the contract is made, for host and device: IEEE fp32 and float64
// operations with one rounding each, bit casts and bf16.
//
// Functions of kernels/contract use only these, so that no compiler may fuse, reassociate or
// approximate. They are always_inline, because translation units compiled for different instruction
// sets must not share a copy.
#ifndef ISOBIT_KERNELS_CONTRACT_PORTABLE_H_
#define ISOBIT_KERNELS_CONTRACT_PORTABLE_H_

#include <cstdint>

#if defined(__CUDACC__)
#define ISOBIT_HD __host__ __device__ __forceinline__
#else
#define ISOBIT_HD inline __attribute__((always_inline))
#endif

namespace isobit::contract {

inline constexpr float kInfinity = __builtin_inff();
inline constexpr float kMinusInfinity = -__builtin_inff();

using Bf16 = uint16_t;  // the bit pattern of a bfloat16

ISOBIT_HD uint32_t BitsOf(float x) { return __builtin_bit_cast(uint32_t, x); }
ISOBIT_HD float FromBits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

#if defined(__CUDA_ARCH__)
ISOBIT_HD float Add(float a, float b) { return __fadd_rn(a, b); }
ISOBIT_HD float Sub(float a, float b) { return __fsub_rn(a, b); }
ISOBIT_HD float Mul(float a, float b) { return __fmul_rn(a, b); }
ISOBIT_HD float Div(float a, float b) { return __fdiv_rn(a, b); }
ISOBIT_HD float Sqrt(float a) { return __fsqrt_rn(a); }
ISOBIT_HD float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
ISOBIT_HD double Add(double a, double b) { return __dadd_rn(a, b); }
ISOBIT_HD double Mul(double a, double b) { return __dmul_rn(a, b); }
ISOBIT_HD double Fma(double a, double b, double c) { return __fma_rn(a, b, c); }
#else
ISOBIT_HD float Add(float a, float b) { return a + b; }
ISOBIT_HD float Sub(float a, float b) { return a - b; }
ISOBIT_HD float Mul(float a, float b) { return a * b; }
ISOBIT_HD float Div(float a, float b) { return a / b; }
ISOBIT_HD float Sqrt(float a) { return __builtin_sqrtf(a); }
ISOBIT_HD float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ISOBIT_HD double Add(double a, double b) { return a + b; }
ISOBIT_HD double Mul(double a, double b) { return a * b; }
ISOBIT_HD double Fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#endif

// The larger of the two; b if a is NaN, a if b is NaN. The order of maxima does not matter, so no
// schedule can change the result.
ISOBIT_HD float Max(float a, float b) {
  if (a != a) return b;
  return b > a ? b : a;
}

ISOBIT_HD float Bf16ToFloat(Bf16 x) { return FromBits(static_cast<uint32_t>(x) << 16); }

// Round to nearest even; every NaN becomes 0x7fff, the pattern the GPU's conversion gives.
ISOBIT_HD Bf16 FloatToBf16(float x) {
  const uint32_t bits = BitsOf(x);
  if (x != x) return 0x7fff;
  return static_cast<Bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace isobit::contract

namespace isobit {

using contract::Bf16;

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CONTRACT_PORTABLE_H_
