// SwiGLU of bf16 gates and ups: the bits of contract::SwiGlu, without a branch per element.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_SWIGLU_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_SWIGLU_CUH_

#include "kernels/contract/constants.h"
#include "kernels/contract/exp_log.h"
#include "kernels/contract/portable.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/common/device/row_columns.cuh"

namespace isobit::cuda {

// 1 / d for d in [1, 2^126], correctly rounded: the hardware's estimate is within one unit in the
// last place, and a Newton step with an exact residual corrects it.
__device__ __forceinline__ float ReciprocalOfSum(float d) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(d));
  const float residual = contract::Fma(-d, estimate, 1.0f);
  return contract::Fma(estimate, residual, estimate);
}

inline constexpr float kLeastModerateGate = -86.0f;

// contract::Sigmoid of a bf16 x >= kLeastModerateGate. The exponent e is clamped to at least -126:
// below that 1 + 2^e rounds to 1, as 1 + 0 does. Above it, the product with 2^n is exact, so the
// product and the sum are one fma. INVARIANT: equal to contract::Sigmoid for every bf16
// (RowKernelsTest.SigmoidOfEveryGate).
__device__ __forceinline__ float SigmoidOfModerate(float x) {
  const float kMagic = 0x1.8p23f;
  const float exponent = fmaxf(contract::Mul(x, -contract::kLog2E), -126.0f);
  const float shifted = contract::Add(exponent, kMagic);
  const float f = contract::Sub(exponent, contract::Sub(shifted, kMagic));
  const float p = contract::Exp2OfFraction(f);
  // The low nine bits of the magic number are zero, so the shift removes it completely.
  const float scale = contract::FromBits((contract::BitsOf(shifted) << 23) + (127u << 23));
  return ReciprocalOfSum(contract::Fma(p, scale, 1.0f));
}

// contract::SwiGlu of each half of pairs of gates and ups.
template <int kPairs>
__device__ __forceinline__ void SwiGluPairs(const uint32_t (&gate)[kPairs],
                                            const uint32_t (&up)[kPairs], uint32_t (&out)[kPairs]) {
  float least = 0.0f;
#pragma unroll
  for (const uint32_t pair : gate) least = fminf(least, fminf(LowOf(pair), HighOf(pair)));
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float low = LowOf(gate[i]);
    const float high = HighOf(gate[i]);
    out[i] = PackBf16(contract::Mul(contract::Mul(low, SigmoidOfModerate(low)), LowOf(up[i])),
                      contract::Mul(contract::Mul(high, SigmoidOfModerate(high)), HighOf(up[i])));
  }
  if (least >= kLeastModerateGate) return;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float low = LowOf(gate[i]);
    const float high = HighOf(gate[i]);
    out[i] = PackBf16(contract::Mul(contract::Mul(low, contract::Sigmoid(low)), LowOf(up[i])),
                      contract::Mul(contract::Mul(high, contract::Sigmoid(high)), HighOf(up[i])));
  }
}

// contract::SwiGlu of each column.
__device__ __forceinline__ Columns SwiGluColumns(const Columns& gate, const Columns& up) {
  Columns out;
  SwiGluPairs(gate.pairs, up.pairs, out.pairs);
  return out;
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_SWIGLU_CUH_
