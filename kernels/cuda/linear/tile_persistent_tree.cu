// The persistent tile kernels of layers whose leaves add in a tree of 4 or 8.
#include "kernels/cuda/linear/tile_kernels.h"
#include "kernels/cuda/linear/tile_persistent.cuh"

namespace isobit::cuda::tile {
namespace {

template <Sums kSums>
LaunchFn Find(const TileSchedule& schedule, bool ragged) {
  if (schedule.rows != 128) return nullptr;
  if (schedule.columns == 128) {
    return ragged ? LaunchPersistent<PersistentTraits<128, 128, kSums, true>>
                  : LaunchPersistent<PersistentTraits<128, 128, kSums, false>>;
  }
  if (schedule.columns == 64 && !ragged) {
    return LaunchPersistent<PersistentTraits<128, 64, kSums, false>>;
  }
  return nullptr;
}

}  // namespace

LaunchFn FindPersistentTree(int num_leaves, const TileSchedule& schedule, bool ragged) {
  if (num_leaves == 4) return Find<Sums::kTree4>(schedule, ragged);
  return num_leaves == 8 ? Find<Sums::kTree8>(schedule, ragged) : nullptr;
}

}  // namespace isobit::cuda::tile
