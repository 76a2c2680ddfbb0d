// Programmatic dependent launch, seen from inside a kernel.
#ifndef ISOBIT_KERNELS_CUDA_DEVICE_DEPENDENT_LAUNCH_CUH_
#define ISOBIT_KERNELS_CUDA_DEVICE_DEPENDENT_LAUNCH_CUH_

namespace isobit::cuda {

// The next kernel of the stream may start once every block has called this or has ended.
__device__ __forceinline__ void ReleaseSuccessor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before this one has completed and its writes are visible. Before that,
// only weights may be read, and the tables and keys and values of earlier steps that
// device_sequences.h names.
__device__ __forceinline__ void WaitForPredecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_DEVICE_DEPENDENT_LAUNCH_CUH_
