// Shared by the row-wise kernels: eight columns of a bf16 row in one thread, and the tree of
// RMSNorm's sum of squares (C5) over the lanes of a warp.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_ROW_COLUMNS_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_ROW_COLUMNS_CUH_

#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/mma_sync.cuh"

namespace isobit::cuda {

inline constexpr int kColumns = 8;  // of a thread's vector: 16 bytes of bf16

// Stores 16 bytes at once, to GPU memory at a multiple of 16. The compiler sometimes splits a plain
// vector store if the words come from different branches.
__device__ __forceinline__ void StoreWord(void* to, uint32_t a, uint32_t b, uint32_t c,
                                          uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Two bf16 in a word; the lower column is in the low half.
__device__ __forceinline__ float LowOf(uint32_t pair) { return contract::FromBits(pair << 16); }
__device__ __forceinline__ float HighOf(uint32_t pair) {
  return contract::FromBits(pair & 0xffff0000u);
}

// Eight consecutive columns.
struct Columns {
  uint32_t pairs[kColumns / 2];
};

// `x` is a multiple of 16 bytes.
__device__ __forceinline__ Columns LoadColumns(const contract::Bf16* x) {
  const uint4 v = *reinterpret_cast<const uint4*>(x);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ void StoreColumns(contract::Bf16* x, const Columns& v) {
  StoreWord(x, v.pairs[0], v.pairs[1], v.pairs[2], v.pairs[3]);
}

// Eight consecutive floats; `x` is a multiple of 16 bytes.
__device__ __forceinline__ void LoadFloats(const float* x, float (&v)[kColumns]) {
  const float4 a = reinterpret_cast<const float4*>(x)[0];
  const float4 b = reinterpret_cast<const float4*>(x)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void StoreFloats(float* x, const float (&v)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns; i += 4) {
    StoreWord(x + i, contract::BitsOf(v[i]), contract::BitsOf(v[i + 1]), contract::BitsOf(v[i + 2]),
              contract::BitsOf(v[i + 3]));
  }
}

// The tree over the vector's two leaves of squares.
__device__ __forceinline__ float SumOfSquares(const Columns& v) {
  static_assert(contract::kNormLeaf == 4 && kColumns == 8);
  float leaves[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t left = v.pairs[2 * i];
    const uint32_t right = v.pairs[2 * i + 1];
    float leaf = contract::Mul(LowOf(left), LowOf(left));
    leaf = contract::Fma(HighOf(left), HighOf(left), leaf);
    leaf = contract::Fma(LowOf(right), LowOf(right), leaf);
    leaves[i] = contract::Fma(HighOf(right), HighOf(right), leaf);
  }
  return contract::Add(leaves[0], leaves[1]);
}

// The tree over kLanes consecutive lanes, a power of two. Every lane of the warp takes part and
// gets the sum over its own kLanes lanes. fp32 addition commutes, so both sides of an exchange have
// the same bits.
template <int kLanes = 32>
__device__ __forceinline__ float TreeOfLanes(float sum) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    sum = contract::Add(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
  }
  return sum;
}

// contract::Normalise of each column.
__device__ __forceinline__ Columns NormaliseColumns(const Columns& x, float inverse_rms,
                                                    const Columns& weight) {
  Columns out;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const uint32_t unit = PackBf16(contract::Mul(LowOf(x.pairs[i]), inverse_rms),
                                   contract::Mul(HighOf(x.pairs[i]), inverse_rms));
    out.pairs[i] = PackBf16(contract::Mul(LowOf(weight.pairs[i]), LowOf(unit)),
                            contract::Mul(HighOf(weight.pairs[i]), HighOf(unit)));
  }
  return out;
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_ROW_COLUMNS_CUH_
