// Finds the tile kernels that exist, by their parameters. Each family has a file of its own.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_KERNELS_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_KERNELS_H_

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/linear/tile.h"

namespace isobit::cuda::tile {

struct Work;

using LaunchFn = absl::Status (*)(const Work& work, const Stream& stream);

// The only tile of leaves that are not uniform (`ragged`).
inline constexpr TileSchedule kRaggedTile = {128, 128, 1};

// Null: there is no such kernel. FindPersistent: for split 1; FindSplit: for larger ones.
LaunchFn FindPersistentChain(const TileSchedule& schedule, bool ragged);
LaunchFn FindPersistentTree(int num_leaves, const TileSchedule& schedule, bool ragged);
LaunchFn FindSplitChain(const TileSchedule& schedule);
LaunchFn FindSplitTree(const TileSchedule& schedule);

}  // namespace isobit::cuda::tile

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_KERNELS_H_
