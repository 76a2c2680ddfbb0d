// 8 x 8 matrices of bf16 between shared memory and the fragments of mma.sync. Addresses are
// shared-memory addresses.
//
// In a fragment of a matrix, lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_MATRIX_FRAGMENTS_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_MATRIX_FRAGMENTS_CUH_

#include <cstdint>

namespace isobit::cuda {

// Four matrices; lane l gives the address of row l % 8, 16 bytes, of matrix l / 8.
__device__ __forceinline__ void LoadMatrices(uint32_t (&fragments)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(address)
               : "memory");
}
// The same, each matrix transposed.
__device__ __forceinline__ void LoadTransposed(uint32_t (&fragments)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(address)
               : "memory");
}
// Stores four matrices; lane l gives the address of row l % 8, 16 bytes, of matrix l / 8.
__device__ __forceinline__ void StoreMatrices(const uint32_t (&fragments)[4], uint32_t address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(fragments[0]), "r"(fragments[1]), "r"(fragments[2]), "r"(fragments[3])
               : "memory");
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_MATRIX_FRAGMENTS_CUH_
