// The linear layer for many rows: 128 or 64 rows of x by a run of packed weight rows in one block's
// registers, fed by bulk copies and multiplied by wgmma.
//
// With split 1 the blocks are persistent, and a tile's leaves follow one another in one block. With
// split S a cluster of S blocks shares a tile: each computes its part of the leaves, and the
// leaves' sums travel through distributed shared memory, which fills the machine when there are few
// tiles.
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

// The schedules that a shape has, at any m. None if a leaf but the last is not a multiple of 16
// columns wide, or K is empty; one or two if the leaves are not uniform (LeafBlocks).
std::vector<TileSchedule> TileSchedules(const LinearShape& shape);

// The one of them expected to be fastest for m rows; they are not empty.
TileSchedule ChooseTile(const DeviceTraits& card, const LinearShape& shape, int64_t m);

// LaunchLinear (linear.h) by one of them. INVALID_ARGUMENT: not one of them, or x cannot have a
// tensor map (device/tensor_map.h). INTERNAL: CUDA refused.
absl::Status LaunchTileLinear(const LinearArgs& args, const TileSchedule& schedule,
                              const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LINEAR_TILE_H_
