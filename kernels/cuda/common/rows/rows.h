// The row-wise ops on a GPU: embedding, RMSNorm, SwiGLU, q/k norm with rotation and cache write,
// and the sum of ranks' partials.
//
// Every launcher enqueues one kernel on the stream and takes the arguments of its op in
// kernels/ops (all pointers are to GPU memory unless it says host). It gives the CPU backend's
// bits for every shape and alignment. It is fast if pointers are multiples of 16 bytes and rows are
// whole 16-byte words. INTERNAL: CUDA refused the launch.
//
// The kernels release their successor before they wait for their predecessor. In a decode step the
// successor is a linear layer, which fetches its weights meanwhile. At tensor-parallel size 4 and
// one row, a layer takes 44.6 us this way, and 48.3 us if the release follows the wait (H200,
// 2026-11-21). For a chain of only small row-wise kernels the other order would be faster.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_ROWS_ROWS_H_
#define ISOBIT_KERNELS_CUDA_COMMON_ROWS_ROWS_H_

#include "absl/status/status.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {

// RMSNorm (kernels/cuda/common/device/ops.h) with a bf16 sum, [rows, hidden], instead of args.sum.
// Only for mode vanilla.
absl::Status LaunchRmsNormOfBf16Sum(const RmsNormArgs& args, const Bf16* sum, const Stream& stream);
// The same with the tree over the ranks' partial sums (C4), [rows, hidden] each, instead of
// args.sum. partials: host memory that points to GPU memory of this device. INVALID_ARGUMENT:
// num_ranks is not 2, 4 or 8.
absl::Status LaunchRmsNormOfPartials(const RmsNormArgs& args, const float* const* partials,
                                     int num_ranks, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_ROWS_ROWS_H_
