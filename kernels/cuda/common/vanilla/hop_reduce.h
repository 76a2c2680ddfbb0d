// The sum of ranks' partials in the contrast modes: added in rank order, rounded to bf16 each time.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_VANILLA_HOP_REDUCE_H_
#define ISOBIT_KERNELS_CUDA_COMMON_VANILLA_HOP_REDUCE_H_

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/reduce.h"

namespace isobit::cuda {

// ring: an element's sum starts at the same rank as in a ring all-reduce; otherwise at rank 0.
// Pointers and errors are those of Run (rows.h).
absl::Status LaunchHopReduce(const ReduceArgs& args, bool ring, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_VANILLA_HOP_REDUCE_H_
