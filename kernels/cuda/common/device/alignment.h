// Whether memory can be read and written in 16-byte words.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_ALIGNMENT_H_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_ALIGNMENT_H_

#include <cstdint>

namespace isobit::cuda {

// Whether every pointer is a multiple of 16 bytes; null counts as one.
template <typename... T>
bool Aligned16(const T*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_ALIGNMENT_H_
