// The tiles of row-major layers whose leaves add in a tree of 8.
#include "kernels/cuda/sm90/linear/find_kernel.h"
#include "kernels/cuda/sm90/linear/mapped.cuh"
#include "kernels/cuda/sm90/linear/product_schedule.h"

namespace isobit::cuda::tile {
namespace {

struct Kernels {
  using LaunchFn = MappedLaunchFn<TreeWork>;
  template <size_t kIndex>
  static constexpr LaunchFn Launcher() {
    constexpr ProductSchedule schedule = kTreeTiles[kIndex];
    return LaunchChains<ProductTraits<TreeWork, schedule.columns, false, schedule.cluster>>;
  }
};

}  // namespace

MappedLaunchFn<TreeWork> FindMapped(const TreeWork&, const ProductSchedule& schedule, bool ragged) {
  if (!ragged) return FindKernel<kTreeTiles, Kernels>(schedule);
  return schedule == kRaggedProduct ? LaunchChains<ProductTraits<TreeWork, 128, true, 1>> : nullptr;
}

}  // namespace isobit::cuda::tile
