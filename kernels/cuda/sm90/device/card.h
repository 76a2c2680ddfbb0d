// What schedules must know about a card: they are pure functions of a layer's shape and of these
// numbers, and affect no bit. Not here: what all Hopper cards have in common (shared_memory.h).
#ifndef ISOBIT_KERNELS_CUDA_SM90_DEVICE_CARD_H_
#define ISOBIT_KERNELS_CUDA_SM90_DEVICE_CARD_H_

#include <bit>
#include <cstdint>

#include "absl/status/statusor.h"

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

// The measured card: H200, SXM.
inline constexpr Card kH200 = {
    .multiprocessors = 132, .clusters_at_once = {132, 64, 30, 15}, .memory_bytes_per_us = 4.3e6};

// The card of a GPU with so many multiprocessors: H200's numbers, as many clusters as its share of
// the multiprocessors allows.
Card CardWith(int64_t multiprocessors);

// The card of this machine's GPU number `ordinal`. INTERNAL: CUDA does not say what it is.
absl::StatusOr<Card> GetCard(int ordinal);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_DEVICE_CARD_H_
