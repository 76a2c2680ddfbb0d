// The linear layer for many rows, by tiles: a block has in its registers the sums of 128 or 64 rows
// of x by a run of packed weight rows. Bulk copies fetch the operands; wgmma multiplies.
//
// With split 1, the blocks are persistent, and one block computes a tile's leaves one after the
// other. With split S, a cluster of S blocks shares a tile: each block computes some of the leaves,
// and they exchange the sums through distributed shared memory. This gives every multiprocessor
// work even if there are few tiles.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/common/device/card.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/linear_shape.h"

namespace isobit::cuda {

struct TileSchedule {
  int rows = 128;     // of x in a tile: 64 or 128
  int columns = 128;  // packed weight rows of a tile
  int split = 1;      // blocks that share a tile's leaves: 1, 2, 4 or 8

  friend bool operator==(const TileSchedule&, const TileSchedule&) = default;
};

// The schedules that a shape can have, for any m. None if K is empty, or if the width of a leaf but
// the last is no multiple of 16; one or two if the leaves are not uniform (LeafBlocks).
std::vector<TileSchedule> TileSchedules(const LinearShape& shape);

// The microseconds that pushed sums are expected to take to other ranks; 0 without push.
double PushTime(const LinearArgs& args);

// The one of TileSchedules(shape), which must not be empty, that is expected to be fastest for m
// rows. push_us: PushTime.
TileSchedule ChooseTile(const Card& card, const LinearShape& shape, int64_t m, double push_us);

// LaunchLinear (linear.h) by one of TileSchedules(shape). INVALID_ARGUMENT: it is not one of them,
// or x cannot have a tensor map (sm90/device/tensor_map.h). INTERNAL: CUDA refused.
absl::Status LaunchTileLinear(const LinearArgs& args, const TileSchedule& schedule,
                              const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_H_
