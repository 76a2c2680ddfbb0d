// Addresses in shared memory as PTX instructions take them.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_SHARED_ADDRESS_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_SHARED_ADDRESS_CUH_

#include <cstdint>

namespace isobit::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_SHARED_ADDRESS_CUH_
