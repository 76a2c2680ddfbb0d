// cp.async: copies from global to shared memory while the thread continues.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_ASYNC_COPY_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_ASYNC_COPY_CUH_

#include <cstdint>

namespace isobit::cuda {

// Copies 16 bytes, aligned; `to` is a shared-memory address. Bypasses the L1 cache.
__device__ __forceinline__ void CopyUnit(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same; if not `real`, writes 16 zero bytes without reading `from`.
__device__ __forceinline__ void CopyUnitOrZero(uint32_t to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(real ? 16 : 0)
               : "memory");
}
// Closes a commit group: this thread's copies since the last commit, possibly none.
__device__ __forceinline__ void CommitUnits() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all commit groups of this thread except the last `left`.
template <int left>
__device__ __forceinline__ void WaitForCommitGroups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}
// Waits for all copies of this thread; a barrier then makes them visible to others.
__device__ __forceinline__ void WaitForUnits() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_ASYNC_COPY_CUH_
