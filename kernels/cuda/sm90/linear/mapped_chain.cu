// The tiles of row-major layers whose leaves add in a chain.
#include "kernels/cuda/sm90/linear/find_kernel.h"
#include "kernels/cuda/sm90/linear/mapped.cuh"
#include "kernels/cuda/sm90/linear/product_schedule.h"

namespace isobit::cuda::tile {
namespace {

struct Kernels {
  using LaunchFn = MappedLaunchFn<ChainWork>;
  template <size_t kIndex>
  static constexpr LaunchFn Launcher() {
    constexpr ProductSchedule schedule = kChainTiles[kIndex];
    return LaunchChains<ProductTraits<ChainWork, schedule.columns, false, schedule.cluster>>;
  }
};

}  // namespace

MappedLaunchFn<ChainWork> FindMapped(const ChainWork&, const ProductSchedule& schedule,
                                     bool ragged) {
  if (!ragged) return FindKernel<kChainTiles, Kernels>(schedule);
  return schedule == kRaggedProduct ? LaunchChains<ProductTraits<ChainWork, 128, true, 1>>
                                    : nullptr;
}

}  // namespace isobit::cuda::tile
