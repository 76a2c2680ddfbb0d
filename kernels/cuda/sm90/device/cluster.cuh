// Thread block clusters: their barrier, and stores to another block's shared memory; some of these
// complete on an mbarrier there. Addresses are shared-memory addresses (SharedAddress).
#ifndef ISOBIT_KERNELS_CUDA_SM90_DEVICE_CLUSTER_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_DEVICE_CLUSTER_CUH_

#include <cstdint>

namespace isobit::cuda {

// The cluster's barrier. Every thread of every block arrives once, and waits before it accesses
// another block's shared memory.
__device__ __forceinline__ void ArriveCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void WaitCluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t BlockInCluster() {
  uint32_t block;
  asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(block));
  return block;
}

// The address in block `rank` of the cluster that corresponds to `address` in this block.
__device__ __forceinline__ uint32_t AddressInBlock(uint32_t address, uint32_t rank) {
  uint32_t result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

// Arrives at a barrier in a block of the cluster; `barrier` is an AddressInBlock.
__device__ __forceinline__ void ArriveAtBlock(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The value becomes visible to that block after the cluster's next barrier.
__device__ __forceinline__ void StoreToBlock(uint32_t to, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

// Stores 16 bytes at `to`; `barrier`, in the same block as `to`, counts them.
__device__ __forceinline__ void StoreToBlock(uint32_t to, float a, float b, float c, float d,
                                             uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
      : "memory");
}

// WaitBarrier for a barrier on which other blocks' stores complete.
__device__ __forceinline__ void WaitClusterBarrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_DEVICE_CLUSTER_CUH_
