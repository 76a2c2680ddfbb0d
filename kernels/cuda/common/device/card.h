// What schedules must know about a card: they are pure functions of a layer's shape and of these
// numbers, and affect no bit. Not here: the numbers (sm90/device/card.h), and what all cards of an
// architecture have in common, such as sm90/device/shared_memory.h.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_CARD_H_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_CARD_H_

#include <bit>
#include <cstdint>

namespace isobit::cuda {

struct Card {
  int64_t multiprocessors;
  // The number of clusters of 1, 2, 4 and 8 blocks that run at once, with one block on each
  // multiprocessor. A cluster stays within a GPC (up to 18 multiprocessors).
  int64_t clusters_at_once[4];
  double memory_bytes_per_us;  // for reading, as measured

  // Of `blocks` blocks each: 1, 2, 4 or 8.
  int64_t ClustersAtOnce(int blocks) const {
    return clusters_at_once[std::countr_zero(static_cast<unsigned>(blocks))];
  }

  friend bool operator==(const Card&, const Card&) = default;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_CARD_H_
