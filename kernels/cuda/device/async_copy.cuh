// cp.async: global to shared memory by a thread that goes on meanwhile.
#ifndef ISOBIT_KERNELS_CUDA_DEVICE_ASYNC_COPY_CUH_
#define ISOBIT_KERNELS_CUDA_DEVICE_ASYNC_COPY_CUH_

#include <cstdint>

namespace isobit::cuda {

// 16 bytes, aligned; `to` is a shared-memory address. Not kept in the L1 cache.
__device__ __forceinline__ void CopyUnit(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Waits for all copies of this thread; a barrier then makes them visible to others.
__device__ __forceinline__ void WaitForUnits() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_DEVICE_ASYNC_COPY_CUH_
