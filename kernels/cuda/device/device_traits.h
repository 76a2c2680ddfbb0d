// What the schedules must know about a card. They are pure functions of a layer's shape and of
// these numbers: another card needs another constant and new measurements. They affect no bit.
#ifndef ISOBIT_KERNELS_CUDA_DEVICE_DEVICE_TRAITS_H_
#define ISOBIT_KERNELS_CUDA_DEVICE_DEVICE_TRAITS_H_

#include <cstdint>

namespace isobit::cuda {

struct DeviceTraits {
  int64_t multiprocessors;
  int64_t shared_bytes;           // of a multiprocessor, for all its blocks
  int64_t block_shared_bytes;     // of a block, the maximum
  int64_t reserved_shared_bytes;  // by the system, per block
  // The number of clusters of 1, 2, 4 and 8 blocks that run at once, with one block on each
  // multiprocessor. A cluster stays within a GPC (up to 18 multiprocessors).
  int64_t clusters_at_once[4];
  double memory_bytes_per_us;  // for reading, as measured
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
