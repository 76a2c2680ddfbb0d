// The loss's and the optimizer's sums, and AdamW, on a GPU (C14, C15).
//
// Every launcher enqueues its kernels on the stream and takes the arguments of its op in
// kernels/training_ops.h. All pointers are to GPU memory. It gives the oracle's bits for every size
// and alignment. `workspace` has the size that the function next to the launcher returns, is at a
// multiple of 16, and may be reused by the next launch on the stream. INTERNAL: CUDA refused a
// launch.
#ifndef ISOBIT_KERNELS_CUDA_ROWS_OPTIMIZER_H_
#define ISOBIT_KERNELS_CUDA_ROWS_OPTIMIZER_H_

#include <cstddef>

#include "absl/status/status.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/training_ops.h"

namespace isobit::cuda {

size_t TreeSumWorkspaceBytes(const TreeSumArgs& args);
absl::Status LaunchTreeSum(const TreeSumArgs& args, std::byte* workspace, const Stream& stream);

absl::Status LaunchSequenceSums(const SequenceSumsArgs& args, const Stream& stream);

size_t TreeSum64WorkspaceBytes(const TreeSum64Args& args);
absl::Status LaunchTreeSum64(const TreeSum64Args& args, std::byte* workspace, const Stream& stream);

absl::Status LaunchSquareSums(const SquareSumsArgs& args, const Stream& stream);

absl::Status LaunchAdamW(const AdamWArgs& args, const Stream& stream);

absl::Status LaunchDither(const DitherArgs& args, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_ROWS_OPTIMIZER_H_
