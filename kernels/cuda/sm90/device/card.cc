// Finds the card of a GPU.
#include "kernels/cuda/sm90/device/card.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/cuda/cuda_status.h"

namespace isobit::cuda {

Card CardWith(int64_t multiprocessors) {
  Card card = kH200;
  card.multiprocessors = multiprocessors;
  for (int64_t& clusters : card.clusters_at_once) {
    clusters = std::max<int64_t>(1, clusters * multiprocessors / kH200.multiprocessors);
  }
  return card;
}

absl::StatusOr<Card> GetCard(int ordinal) {
  int multiprocessors = 0;
  ISOBIT_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal));
  return CardWith(multiprocessors);
}

}  // namespace isobit::cuda
