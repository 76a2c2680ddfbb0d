// The sum of ranks' partials as the contrast modes have it: from rank to rank, with bf16 between.
#ifndef ISOBIT_KERNELS_CUDA_VANILLA_HOP_REDUCE_H_
#define ISOBIT_KERNELS_CUDA_VANILLA_HOP_REDUCE_H_

#include "absl/status/status.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/ops.h"

namespace isobit::cuda {

// ring: an element's sum starts at the rank that a ring all-reduce starts it at, else at rank 0.
// Pointers and errors as LaunchReduce (rows/rows.h).
absl::Status LaunchHopReduce(const ReduceArgs& args, bool ring, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_VANILLA_HOP_REDUCE_H_
