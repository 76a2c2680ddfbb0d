// The persistent tile kernels of layers whose leaves add in a chain.
#include "kernels/cuda/linear/tile_kernels.h"
#include "kernels/cuda/linear/tile_persistent.cuh"

namespace isobit::cuda::tile {
namespace {

template <int kRows, int kColumns>
constexpr LaunchFn kLaunch =
    LaunchPersistent<PersistentTraits<kRows, kColumns, Sums::kChain, false>>;

}  // namespace

LaunchFn FindPersistentChain(const TileSchedule& schedule, bool ragged) {
  if (ragged) {
    return schedule == TileSchedule{}
               ? LaunchPersistent<PersistentTraits<128, 128, Sums::kChain, true>>
               : nullptr;
  }
  switch (1000 * schedule.rows + schedule.columns) {
    case 64048:
      return kLaunch<64, 48>;
    case 64144:
      return kLaunch<64, 144>;
    case 128064:
      return kLaunch<128, 64>;
    case 128096:
      return kLaunch<128, 96>;
    case 128128:
      return kLaunch<128, 128>;
    case 128144:
      return kLaunch<128, 144>;
    case 128160:
      return kLaunch<128, 160>;
    case 128192:
      return kLaunch<128, 192>;
    case 128208:
      return kLaunch<128, 208>;
    default:
      return nullptr;
  }
}

}  // namespace isobit::cuda::tile
