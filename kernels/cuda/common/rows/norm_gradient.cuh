// The gradient of RMSNorm (C12) on a vector of eight columns, for rows and for heads.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_ROWS_NORM_GRADIENT_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_ROWS_NORM_GRADIENT_CUH_

#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/common/device/row_columns.cuh"

namespace isobit::cuda {

inline constexpr int kLeavesOfLane = kColumns / contract::kNormLeaf;

// Makes the compiler compute again what follows from v. Kept over a reduction, the products of v
// would take more registers than v itself.
__device__ __forceinline__ void ForgetProducts(Columns* v) {
#pragma unroll
  for (uint32_t& pair : v->pairs) asm volatile("" : "+r"(pair));
}

// contract::NormGradient's h and g of the two columns of a pair.
struct PairTerms {
  float h[2];
  float g[2];
};
__device__ __forceinline__ PairTerms TermsOf(uint32_t x, uint32_t dy, uint32_t weight,
                                             float inverse) {
  return {{contract::Mul(LowOf(x), inverse), contract::Mul(HighOf(x), inverse)},
          {contract::Mul(LowOf(dy), LowOf(weight)), contract::Mul(HighOf(dy), HighOf(weight))}};
}

// The dot product of h and g over the vector's leaves.
__device__ __forceinline__ float DotOfColumns(const Columns& x, const Columns& dy,
                                              const Columns& weight, float inverse) {
  float leaves[kLeavesOfLane];
#pragma unroll
  for (int i = 0; i < kLeavesOfLane; ++i) {
    const PairTerms a = TermsOf(x.pairs[2 * i], dy.pairs[2 * i], weight.pairs[2 * i], inverse);
    const PairTerms b =
        TermsOf(x.pairs[2 * i + 1], dy.pairs[2 * i + 1], weight.pairs[2 * i + 1], inverse);
    leaves[i] =
        contract::DotLeaf({a.g[0], a.g[1], b.g[0], b.g[1]}, {a.h[0], a.h[1], b.h[0], b.h[1]});
  }
  return contract::Add(leaves[0], leaves[1]);
}

__device__ __forceinline__ Columns NormGradientOfColumns(const Columns& x, const Columns& dy,
                                                         const Columns& weight, float inverse,
                                                         float mean) {
  Columns dx;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const PairTerms t = TermsOf(x.pairs[i], dy.pairs[i], weight.pairs[i], inverse);
    dx.pairs[i] = PackBf16(contract::Mul(inverse, contract::Fma(-t.h[0], mean, t.g[0])),
                           contract::Mul(inverse, contract::Fma(-t.h[1], mean, t.g[1])));
  }
  return dx;
}

// Adds contract::NormWeightTerm of each column.
__device__ __forceinline__ void AddWeightTerms(const Columns& x, const Columns& dy, float inverse,
                                               float (&sum)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const uint32_t unit = PackBf16(contract::Mul(LowOf(x.pairs[i]), inverse),
                                   contract::Mul(HighOf(x.pairs[i]), inverse));
    sum[2 * i] = contract::Add(sum[2 * i], contract::Mul(LowOf(dy.pairs[i]), LowOf(unit)));
    sum[2 * i + 1] =
        contract::Add(sum[2 * i + 1], contract::Mul(HighOf(dy.pairs[i]), HighOf(unit)));
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_ROWS_NORM_GRADIENT_CUH_
