// Four columns of a row in one thread: the update of the residual by the sum over ranks, and
// RMSNorm (C4, C5). A row has one thread here for each leaf of its tree of squares. In
// row_columns.cuh a thread has eight columns.
#ifndef ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ROW_QUADS_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ROW_QUADS_CUH_

#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/row_columns.cuh"

namespace isobit::cuda {

inline constexpr int kQuad = 4;  // columns

// Four columns of a row; +0 beyond its end. kAligned: the row consists of whole quads, at multiples
// of 16 bytes.
template <bool kAligned>
__device__ __forceinline__ uint4 LoadFloatQuad(const float* x, int left) {
  if constexpr (kAligned) return *reinterpret_cast<const uint4*>(x);
  return {contract::BitsOf(x[0]), left > 1 ? contract::BitsOf(x[1]) : 0u,
          left > 2 ? contract::BitsOf(x[2]) : 0u, left > 3 ? contract::BitsOf(x[3]) : 0u};
}
template <bool kAligned>
__device__ __forceinline__ uint2 LoadBf16Quad(const contract::Bf16* x, int left) {
  if constexpr (kAligned) return *reinterpret_cast<const uint2*>(x);
  const auto at = [&](int i) { return left > i ? static_cast<uint32_t>(x[i]) : 0u; };
  return {at(0) | at(1) << 16, at(2) | at(3) << 16};
}
template <bool kAligned>
__device__ __forceinline__ void StoreBf16Quad(contract::Bf16* x, uint2 v, int left) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint2*>(x) = v;
  } else {
    x[0] = static_cast<contract::Bf16>(v.x);
    if (left > 1) x[1] = static_cast<contract::Bf16>(v.x >> 16);
    if (left > 2) x[2] = static_cast<contract::Bf16>(v.y);
    if (left > 3) x[3] = static_cast<contract::Bf16>(v.y >> 16);
  }
}

// The order in which ranks' partials are added: the contract's tree (C4).
struct TreeOrder {
  __device__ static float Sum(const float* values, int ranks) {
    return contract::TreeOf(values, ranks);
  }
};

// What the ranks' partials of a column add to the residual, before rounding to bf16.
template <typename Order, int kRanks>
__device__ __forceinline__ float DeltaOf(const uint32_t (&partials)[kRanks], float bias) {
  float values[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) values[r] = contract::FromBits(partials[r]);
  return contract::Add(Order::Sum(values, kRanks), bias);
}

// contract::AddResidual of four columns.
template <typename Order, int kRanks>
__device__ __forceinline__ uint2 AddPartials(uint2 residual, const uint4 (&partials)[kRanks],
                                             float4 bias) {
  uint32_t x[kRanks], y[kRanks], z[kRanks], w[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    x[r] = partials[r].x, y[r] = partials[r].y, z[r] = partials[r].z, w[r] = partials[r].w;
  }
  const uint32_t low = PackBf16(DeltaOf<Order>(x, bias.x), DeltaOf<Order>(y, bias.y));
  const uint32_t high = PackBf16(DeltaOf<Order>(z, bias.z), DeltaOf<Order>(w, bias.w));
  return {PackBf16(contract::Add(LowOf(residual.x), LowOf(low)),
                   contract::Add(HighOf(residual.x), HighOf(low))),
          PackBf16(contract::Add(LowOf(residual.y), LowOf(high)),
                   contract::Add(HighOf(residual.y), HighOf(high)))};
}

// The leaf of the row's tree of squares (C5).
__device__ __forceinline__ float SumOfSquares(uint2 h) {
  static_assert(contract::kNormLeaf == kQuad);
  float leaf = contract::Mul(LowOf(h.x), LowOf(h.x));
  leaf = contract::Fma(HighOf(h.x), HighOf(h.x), leaf);
  leaf = contract::Fma(LowOf(h.y), LowOf(h.y), leaf);
  return contract::Fma(HighOf(h.y), HighOf(h.y), leaf);
}

__device__ __forceinline__ uint32_t NormalisePair(uint32_t x, float inverse_rms, uint32_t weight) {
  const uint32_t unit =
      PackBf16(contract::Mul(LowOf(x), inverse_rms), contract::Mul(HighOf(x), inverse_rms));
  return PackBf16(contract::Mul(LowOf(weight), LowOf(unit)),
                  contract::Mul(HighOf(weight), HighOf(unit)));
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ROW_QUADS_CUH_
