// The tiles of row-major layers whose leaves add in a chain.
#include "kernels/cuda/linear/mapped.cuh"

namespace isobit::cuda::tile {
namespace {

template <int kColumns, bool kRagged, int kCluster>
constexpr MappedLaunchFn<ChainWork> kLaunch =
    LaunchChains<ProductTraits<ChainWork, kColumns, kRagged, kCluster>>;

}  // namespace

MappedLaunchFn<ChainWork> FindMapped(const ChainWork&, int columns, int cluster, bool ragged) {
  if (ragged) return columns == 128 && cluster == 1 ? kLaunch<128, true, 1> : nullptr;
  switch (1000 * cluster + columns) {
    case 1064:
      return kLaunch<64, false, 1>;
    case 1128:
      return kLaunch<128, false, 1>;
    case 2128:
      return kLaunch<128, false, 2>;
    case 2192:
      return kLaunch<192, false, 2>;
    case 2208:
      return kLaunch<208, false, 2>;
    default:
      return nullptr;
  }
}

}  // namespace isobit::cuda::tile
