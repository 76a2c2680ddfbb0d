// The tile kernels that split the leaves of a tree over a cluster.
#include "kernels/cuda/linear_tile_kernels.h"
#include "kernels/cuda/linear_tile_split.cuh"

namespace isobit::cuda::tile {
namespace {

template <int kColumns, int kSplit>
constexpr LaunchFn kLaunch = LaunchSplit<SplitTraits<kColumns, kSplit, contract::LeafSum::kTree>>;

}  // namespace

LaunchFn FindSplitTree(int columns, int split) {
  switch (1000 * split + columns) {
    case 2064:
      return kLaunch<64, 2>;
    case 2128:
      return kLaunch<128, 2>;
    case 4064:
      return kLaunch<64, 4>;
    case 4128:
      return kLaunch<128, 4>;
    case 8064:
      return kLaunch<64, 8>;
    case 8128:
      return kLaunch<128, 8>;
    default:
      return nullptr;
  }
}

}  // namespace isobit::cuda::tile
