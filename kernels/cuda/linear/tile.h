// The linear layer for many rows, by tiles: a block holds the sums of 128 or 64 rows of x by a run
// of packed weight rows in its registers. Bulk copies bring the operands, wgmma multiplies.
//
// With split 1 the blocks are persistent, and one block computes a tile's leaves one after the
// other. With split S a cluster of S blocks shares a tile: each block computes some of the leaves,
// and they exchange the sums through distributed shared memory. That gives every multiprocessor
// work when there are few tiles.
#ifndef ISOBIT_KERNELS_CUDA_LINEAR_TILE_H_
#define ISOBIT_KERNELS_CUDA_LINEAR_TILE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/device/device_traits.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/ops.h"

namespace isobit::cuda {

struct TileSchedule {
  int rows = 128;     // of x in a tile: 64 or 128
  int columns = 128;  // packed weight rows of a tile
  int split = 1;      // blocks that share a tile's leaves: 1, 2, 4 or 8

  friend bool operator==(const TileSchedule&, const TileSchedule&) = default;
};

// The schedules that a shape can have, at any m. None if K is empty or a leaf other than the last
// is not a multiple of 16 columns wide; one or two if the leaves are not uniform (LeafBlocks).
std::vector<TileSchedule> TileSchedules(const LinearShape& shape);

// Microseconds that the sums of a layer that pushes take to other ranks, as expected; else 0.
double PushTime(const LinearArgs& args);

// The schedule of TileSchedules(shape), which must not be empty, that is expected to be fastest for
// m rows. push_us: PushTime.
TileSchedule ChooseTile(const DeviceTraits& card, const LinearShape& shape, int64_t m,
                        double push_us);

// LaunchLinear (linear.h) by one of TileSchedules(shape). INVALID_ARGUMENT: it is not one of them,
// or x cannot have a tensor map (device/tensor_map.h). INTERNAL: CUDA refused.
absl::Status LaunchTileLinear(const LinearArgs& args, const TileSchedule& schedule,
                              const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LINEAR_TILE_H_
