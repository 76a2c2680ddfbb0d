// Programmatic dependent launch, inside a kernel. Compute capabilities below 9.0 do not have it:
// there a kernel starts after its predecessor, and both functions are empty.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_DEPENDENT_LAUNCH_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_DEPENDENT_LAUNCH_CUH_

namespace isobit::cuda {

// The stream's next kernel may start once every block has called this or has ended.
__device__ __forceinline__ void ReleaseSuccessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel has completed and its writes are visible. Before that a kernel
// may read only weights, and those tables, keys and values of earlier steps that device_sequences.h
// names.
__device__ __forceinline__ void WaitForPredecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_DEPENDENT_LAUNCH_CUH_
