// The persistent tile kernels of layers whose leaves add in a tree of 4 or 8.
#include "kernels/cuda/sm90/linear/find_kernel.h"
#include "kernels/cuda/sm90/linear/tile_kernels.h"
#include "kernels/cuda/sm90/linear/tile_persistent.cuh"
#include "kernels/cuda/sm90/linear/tile_table.h"

namespace isobit::cuda::tile {
namespace {

template <Sums kSums>
struct Kernels {
  using LaunchFn = tile::LaunchFn;
  template <size_t kIndex>
  static constexpr LaunchFn Launcher() {
    constexpr TileSchedule tile = kPersistentTreeTiles[kIndex].schedule;
    return LaunchPersistent<PersistentTraits<tile.rows, tile.columns, kSums, false>>;
  }
};

template <Sums kSums>
LaunchFn Find(const TileSchedule& schedule, bool ragged) {
  if (!ragged) return FindKernel<kPersistentTreeTiles, Kernels<kSums>>(schedule);
  return schedule == kRaggedTile ? LaunchPersistent<PersistentTraits<128, 128, kSums, true>>
                                 : nullptr;
}

}  // namespace

LaunchFn FindPersistentTree(int num_leaves, const TileSchedule& schedule, bool ragged) {
  if (num_leaves == 4) return Find<Sums::kTree4>(schedule, ragged);
  return num_leaves == 8 ? Find<Sums::kTree8>(schedule, ragged) : nullptr;
}

}  // namespace isobit::cuda::tile
