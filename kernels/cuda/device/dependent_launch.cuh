// Programmatic dependent launch, inside a kernel.
#ifndef ISOBIT_KERNELS_CUDA_DEVICE_DEPENDENT_LAUNCH_CUH_
#define ISOBIT_KERNELS_CUDA_DEVICE_DEPENDENT_LAUNCH_CUH_

namespace isobit::cuda {

// The stream's next kernel may start once every block has called this or has ended.
__device__ __forceinline__ void ReleaseSuccessor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the previous kernel has completed and its writes are visible. Before that a kernel
// may read only weights, and those tables, keys and values of earlier steps that device_sequences.h
// names.
__device__ __forceinline__ void WaitForPredecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_DEVICE_DEPENDENT_LAUNCH_CUH_
