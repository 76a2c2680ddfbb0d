// The contract's exp2 where the argument is known not to be large: the same bits in fewer
// instructions.
#ifndef ISOBIT_KERNELS_CUDA_DEVICE_BOUNDED_EXP2_CUH_
#define ISOBIT_KERNELS_CUDA_DEVICE_BOUNDED_EXP2_CUH_

#include "kernels/contract/portable.h"

namespace isobit::cuda {

// contract::Exp2(x) for every x <= 126, for -inf and for NaN.
//
// The polynomial's coefficients are halved and the power doubled, both exact, so that the power's
// exponent field is the low byte of `shifted` as it stands. Below -126 the product is subnormal,
// which a flushing multiplication turns into the contract's +0; the clamp keeps the field from
// wrapping round.
// INVARIANT: attention_prefill_test, BoundedExp2Test.EveryArgument.
__device__ __forceinline__ float BoundedExp2(float x) {
  using contract::Add;
  using contract::Fma;
  using contract::Sub;
  constexpr float kMagic = 0x1.8p23f + 128.0f;
  float clamped;  // NaN stays NaN
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(clamped) : "f"(x), "f"(-127.0f));
  const float shifted = Add(clamped, kMagic);
  const float f = Sub(clamped, Sub(shifted, kMagic));
  float p = 0x1.5bda40p-11f;
  p = Fma(p, f, 0x1.3ce8acp-8f);
  p = Fma(p, f, 0x1.c6b6d8p-6f);
  p = Fma(p, f, 0x1.ebf9c2p-4f);
  p = Fma(p, f, 0x1.62e42ap-2f);
  p = Fma(p, f, 0.5f);
  float result;
  asm("mul.rn.ftz.f32 %0, %1, %2;"
      : "=f"(result)
      : "f"(p), "f"(contract::FromBits(contract::BitsOf(shifted) << 23)));
  return result;
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_DEVICE_BOUNDED_EXP2_CUH_
