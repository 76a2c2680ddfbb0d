// What the schedules must know of a card. They are pure functions of a layer's shape and of these
// numbers: another card needs another constant and new measurements. No bit depends on them.
#ifndef ISOBIT_KERNELS_CUDA_DEVICE_DEVICE_TRAITS_H_
#define ISOBIT_KERNELS_CUDA_DEVICE_DEVICE_TRAITS_H_

#include <cstdint>

namespace isobit::cuda {

struct DeviceTraits {
  int64_t multiprocessors;
  int64_t shared_bytes;           // of a multiprocessor, for all its blocks
  int64_t block_shared_bytes;     // of a block, at most
  int64_t reserved_shared_bytes;  // by the system, for each block
  // Clusters of 1, 2, 4 and 8 blocks that run at once, each block alone on its multiprocessor. A
  // cluster cannot reach beyond a GPC (up to 18 multiprocessors).
  int64_t clusters_at_once[4];
  double memory_bytes_per_us;  // read, as measured
};

// H200, SXM.
inline constexpr DeviceTraits kH200 = {.multiprocessors = 132,
                                       .shared_bytes = 228 * 1024,
                                       .block_shared_bytes = 227 * 1024,
                                       .reserved_shared_bytes = 1024,
                                       .clusters_at_once = {132, 64, 30, 15},
                                       .memory_bytes_per_us = 4.3e6};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_DEVICE_DEVICE_TRAITS_H_
