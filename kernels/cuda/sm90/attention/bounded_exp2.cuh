// The contract's exp2 for arguments known to be
// small: the same bits in fewer instructions.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_BOUNDED_EXP2_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_BOUNDED_EXP2_CUH_

#include "kernels/contract/exp_log.h"
#include "kernels/contract/portable.h"

namespace isobit::cuda {

// x[i] = contract::Exp2(x[i]), for every x[i] <= 126, for -inf and for NaN. The n computations are
// interleaved, so that even one warp hides the latency of their dependent instructions.
//
// The polynomial's coefficients are halved and the power is doubled. Both are exact, and make the
// low byte of `shifted` the power's exponent field without further change. Below -126 the product
// is subnormal, and the multiplication flushes it to zero, which is the contract's +0. The clamp
// keeps the exponent field from wrapping round.
// INVARIANT: attention_prefill_test, BoundedExp2Test.EveryArgument.
template <int n>
__device__ __forceinline__ void BoundedExp2(float (&x)[n]) {
  constexpr float kMagic = 0x1.8p23f + 128.0f;
  float shifted[n];
  float p[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(-127.0f));  // NaN stays NaN
  }
#pragma unroll
  for (int i = 0; i < n; ++i) shifted[i] = contract::Add(x[i], kMagic);
#pragma unroll
  for (int i = 0; i < n; ++i) p[i] = contract::Sub(shifted[i], kMagic);
#pragma unroll
  for (int i = 0; i < n; ++i) x[i] = contract::Sub(x[i], p[i]);
#pragma unroll
  for (int i = 0; i < n; ++i) p[i] = contract::Exp2Coefficient(5) / 2;
#pragma unroll
  for (int power = 4; power >= 0; --power) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      p[i] = contract::Fma(p[i], x[i], contract::Exp2Coefficient(power) / 2);
    }
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    asm("mul.rn.ftz.f32 %0, %1, %2;"
        : "=f"(x[i])
        : "f"(p[i]), "f"(contract::FromBits(contract::BitsOf(shifted[i]) << 23)));
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_BOUNDED_EXP2_CUH_
