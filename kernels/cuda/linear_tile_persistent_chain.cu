// The persistent tile kernels of layers whose leaves add in a chain.
#include "kernels/cuda/linear_tile_kernels.h"
#include "kernels/cuda/linear_tile_persistent.cuh"

namespace isobit::cuda::tile {

LaunchFn FindPersistentChain(int columns, bool ragged) {
  if (ragged) {
    return columns == 128 ? LaunchPersistent<PersistentTraits<128, Sums::kChain, true>> : nullptr;
  }
  switch (columns) {
    case 64:
      return LaunchPersistent<PersistentTraits<64, Sums::kChain, false>>;
    case 96:
      return LaunchPersistent<PersistentTraits<96, Sums::kChain, false>>;
    case 128:
      return LaunchPersistent<PersistentTraits<128, Sums::kChain, false>>;
    case 192:
      return LaunchPersistent<PersistentTraits<192, Sums::kChain, false>>;
    default:
      return nullptr;
  }
}

}  // namespace isobit::cuda::tile
