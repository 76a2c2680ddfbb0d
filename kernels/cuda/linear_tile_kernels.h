// The tile kernels that exist, by their parameters; each family is a file of its own.
#ifndef ISOBIT_KERNELS_CUDA_LINEAR_TILE_KERNELS_H_
#define ISOBIT_KERNELS_CUDA_LINEAR_TILE_KERNELS_H_

#include "absl/status/status.h"
#include "kernels/cuda/launch.h"

namespace isobit::cuda::tile {

struct Work;

// num_sms: a persistent kernel's largest grid.
using LaunchFn = absl::Status (*)(const Work& work, int num_sms, const Stream& stream);

// Null: there is no such kernel. `columns`: of a tile; `ragged`: the leaves are not uniform.
LaunchFn FindPersistentChain(int columns, bool ragged);
LaunchFn FindPersistentTree(int num_leaves, int columns, bool ragged);
LaunchFn FindSplitChain(int columns, int split);
LaunchFn FindSplitTree(int columns, int split);

}  // namespace isobit::cuda::tile

#endif  // ISOBIT_KERNELS_CUDA_LINEAR_TILE_KERNELS_H_
