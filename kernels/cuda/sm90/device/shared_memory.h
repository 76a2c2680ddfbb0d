// The shared memory of compute capability 9.0, for which the kernels are compiled: the same on
// every card. Not here: what differs between cards (card.h).
#ifndef ISOBIT_KERNELS_CUDA_SM90_DEVICE_SHARED_MEMORY_H_
#define ISOBIT_KERNELS_CUDA_SM90_DEVICE_SHARED_MEMORY_H_

#include <cstdint>

namespace isobit::cuda {

inline constexpr int64_t kMultiprocessorSharedBytes = 228 * 1024;
inline constexpr int64_t kBlockSharedBytes = 227 * 1024;  // at most
inline constexpr int64_t kReservedSharedBytes = 1024;     // by the system, for each block

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_DEVICE_SHARED_MEMORY_H_
