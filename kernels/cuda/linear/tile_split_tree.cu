// The tile kernels that split the leaves of a tree over a cluster.
#include "kernels/cuda/linear/tile_kernels.h"
#include "kernels/cuda/linear/tile_split.cuh"

namespace isobit::cuda::tile {
namespace {

template <int kRows, int kColumns, int kSplit>
constexpr LaunchFn kLaunch =
    LaunchSplit<SplitTraits<kRows, kColumns, kSplit, contract::LeafSum::kTree>>;

}  // namespace

LaunchFn FindSplitTree(const TileSchedule& schedule) {
  switch (10000 * schedule.rows + 10 * schedule.columns + schedule.split) {
    case 640642:
      return kLaunch<64, 64, 2>;
    case 1280642:
      return kLaunch<128, 64, 2>;
    case 1280802:
      return kLaunch<128, 80, 2>;
    case 1280962:
      return kLaunch<128, 96, 2>;
    case 1281282:
      return kLaunch<128, 128, 2>;
    case 1281602:
      return kLaunch<128, 160, 2>;
    case 1280644:
      return kLaunch<128, 64, 4>;
    case 1281284:
      return kLaunch<128, 128, 4>;
    case 1280648:
      return kLaunch<128, 64, 8>;
    case 1281288:
      return kLaunch<128, 128, 8>;
    default:
      return nullptr;
  }
}

}  // namespace isobit::cuda::tile
