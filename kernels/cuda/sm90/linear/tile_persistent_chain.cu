// The persistent tile kernels of layers whose leaves add in a chain.
#include "kernels/cuda/sm90/linear/find_kernel.h"
#include "kernels/cuda/sm90/linear/tile_kernels.h"
#include "kernels/cuda/sm90/linear/tile_persistent.cuh"
#include "kernels/cuda/sm90/linear/tile_table.h"

namespace isobit::cuda::tile {
namespace {

struct Kernels {
  using LaunchFn = tile::LaunchFn;
  template <size_t kIndex>
  static constexpr LaunchFn Launcher() {
    constexpr TileSchedule tile = kPersistentChainTiles[kIndex].schedule;
    return LaunchPersistent<PersistentTraits<tile.rows, tile.columns, Sums::kChain, false>>;
  }
};

}  // namespace

LaunchFn FindPersistentChain(const TileSchedule& schedule, bool ragged) {
  if (!ragged) return FindKernel<kPersistentChainTiles, Kernels>(schedule);
  return schedule == kRaggedTile ? LaunchPersistent<PersistentTraits<128, 128, Sums::kChain, true>>
                                 : nullptr;
}

}  // namespace isobit::cuda::tile
