// The row-wise ops of training on a GPU (kernels/training_ops.h): gradients of RMSNorm, SwiGLU, q
// and k heads, and embedding; the op between the qkv projection and attention; column sums.
//
// Every launcher enqueues its kernels on the stream and takes the arguments of its op. All pointers
// are to GPU memory unless they say host. It gives the oracle's bits for every shape and alignment,
// and is fast if pointers are multiples of 16 bytes and rows are whole 16-byte words. `workspace`
// has the size that the function next to the launcher returns, is at a multiple of 16, and may be
// reused by the next launch on the stream. INTERNAL: CUDA refused a launch. INVALID_ARGUMENT: the
// number of packs is not a power of two, at most 64.
#ifndef ISOBIT_KERNELS_CUDA_ROWS_GRADIENTS_H_
#define ISOBIT_KERNELS_CUDA_ROWS_GRADIENTS_H_

#include <cstddef>

#include "absl/status/status.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/training_ops.h"

namespace isobit::cuda {

size_t ColumnSumsWorkspaceBytes(const ColumnSumsArgs& args);
absl::Status LaunchColumnSums(const ColumnSumsArgs& args, std::byte* workspace,
                              const Stream& stream);

size_t RmsNormGradientWorkspaceBytes(const RmsNormGradientArgs& args);
absl::Status LaunchRmsNormGradient(const RmsNormGradientArgs& args, std::byte* workspace,
                                   const Stream& stream);

absl::Status LaunchSwiGluGradient(const SwiGluGradientArgs& args, const Stream& stream);

absl::Status LaunchTrainingQkv(const TrainingQkvArgs& args, const Stream& stream);

size_t QkvGradientWorkspaceBytes(const QkvGradientArgs& args);
absl::Status LaunchQkvGradient(const QkvGradientArgs& args, std::byte* workspace,
                               const Stream& stream);

absl::Status LaunchEmbeddingGradient(const EmbeddingGradientArgs& args, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_ROWS_GRADIENTS_H_
