// The tile kernels that split the leaves of a tree over a cluster.
#include "kernels/cuda/sm90/linear/find_kernel.h"
#include "kernels/cuda/sm90/linear/tile_kernels.h"
#include "kernels/cuda/sm90/linear/tile_split.cuh"
#include "kernels/cuda/sm90/linear/tile_table.h"

namespace isobit::cuda::tile {
namespace {

struct Kernels {
  using LaunchFn = tile::LaunchFn;
  template <size_t kIndex>
  static constexpr LaunchFn Launcher() {
    constexpr TileSchedule tile = kSplitTreeTiles[kIndex].schedule;
    return LaunchSplit<SplitTraits<tile.rows, tile.columns, tile.split, contract::LeafSum::kTree>>;
  }
};

}  // namespace

LaunchFn FindSplitTree(const TileSchedule& schedule) {
  return FindKernel<kSplitTreeTiles, Kernels>(schedule);
}

}  // namespace isobit::cuda::tile
