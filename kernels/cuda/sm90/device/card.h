// The numbers of Hopper cards.
#ifndef ISOBIT_KERNELS_CUDA_SM90_DEVICE_CARD_H_
#define ISOBIT_KERNELS_CUDA_SM90_DEVICE_CARD_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/cuda/common/device/card.h"

namespace isobit::cuda {

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
