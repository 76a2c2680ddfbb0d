// The bulk copy engine (TMA): global to shared memory, completing on an mbarrier, and back.
#ifndef ISOBIT_KERNELS_CUDA_SM90_DEVICE_BULK_COPY_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_DEVICE_BULK_COPY_CUH_

#include <cuda.h>

#include <cstdint>

namespace isobit::cuda {

// L2 eviction policies, as createpolicy encodes them.
inline constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
inline constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

// `bytes` consecutive bytes; addresses and size are multiples of 16.
__device__ __forceinline__ void CopyBytes(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Prefetches a kernel parameter's tensor map, so that its first use is fast.
__device__ __forceinline__ void PrefetchMap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box of a matrix whose first element is (row, column) to shared memory.
__device__ __forceinline__ void CopyBox(uint32_t to, const CUtensorMap& map, int32_t row,
                                        int32_t column, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_"
      "hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// The same for a map of heads (MapHeads): from `row` and `column` of one head on.
__device__ __forceinline__ void CopyHeadBox(uint32_t to, const CUtensorMap& map, int32_t row,
                                            int32_t head, int32_t column, uint32_t barrier,
                                            uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_"
      "hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(column), "r"(head), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// CopyBox to those blocks of the cluster whose bits are set in `blocks`: to the same address in
// each, and each block's barrier counts its bytes.
__device__ __forceinline__ void CopyBoxToBlocks(uint32_t to, const CUtensorMap& map, int32_t row,
                                                int32_t column, uint32_t barrier, uint64_t policy,
                                                uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::"
      "cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

// Copies shared memory to the box at (row, column); writes nothing outside the matrix.
__device__ __forceinline__ void StoreBox(const CUtensorMap& map, uint32_t from, int32_t row,
                                         int32_t column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
// Copies `bytes` consecutive bytes of shared memory; addresses and size are multiples of 16.
__device__ __forceinline__ void StoreBytes(void* to, uint32_t from, uint32_t bytes,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
      "r"(from), "r"(bytes), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's stores have read shared memory.
__device__ __forceinline__ void WaitForStoreReads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Waits until this thread's stores have been written.
__device__ __forceinline__ void WaitForStores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_DEVICE_BULK_COPY_CUH_
