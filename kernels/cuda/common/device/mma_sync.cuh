// mma.sync m16n8k16: one k16 step of the contract (C1) by one warp, the same bits as wgmma.
//
// Lane l, g = l / 4, q = l % 4. a[0]: row g, columns 2q, 2q+1; a[1]: row g + 8; a[2], a[3]: the
// same rows, columns + 8. b[0]: column g of the product, k 2q, 2q+1; b[1]: k + 8. d[0], d[1]: row
// g, columns 2q, 2q+1; d[2], d[3]: row g + 8.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_MMA_SYNC_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_MMA_SYNC_CUH_

#include <cstdint>

namespace isobit::cuda {

__device__ __forceinline__ void MmaSync(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two floats to bf16, round to nearest even, `low` in the low half. NaN becomes 0x7fff.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_MMA_SYNC_CUH_
