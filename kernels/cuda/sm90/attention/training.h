// Attention in training: whole sequences in row-major tensors (TrainingAttentionArgs), with the
// bits of C6, and its gradient (C13). Every head size that is a multiple of 8, at most 256, runs on
// the smallest schedule of 64, 96, 128 or 256 columns that holds it: columns of +0 change no bit.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_TRAINING_H_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_TRAINING_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/attention.h"

namespace isobit::cuda {

// AttentionGradient with a given workspace. The kernel of dK and dV leaves the scores' gradients in
// the workspace for the kernel of dQ, for as many KV heads at a time as fit into the workspace. If
// not even one fits, the second kernel computes them again, which takes longer. This changes no
// bit. Errors: those of TrainingAttention; INVALID_ARGUMENT: the workspace is too small.
//
// `workspace` is scratch in GPU memory, aligned to 256 bytes, that needs no initialisation.
absl::Status LaunchAttentionGradient(const AttentionGradientArgs& args,
                                     absl::Span<std::byte> workspace, const Stream& stream);

// For the scores' gradients: enough for two KV heads of 4 query heads, at 16,384 positions.
inline constexpr size_t kMaxScoreBytes = size_t{9} << 28;  // 2.25 GiB

// The size of the workspace with which the gradient is fastest, if at most max_score_bytes of it
// are for the scores' gradients; with 0, the smallest size that it needs. A function of the
// card, the shapes and sequences.bounds.
size_t AttentionGradientWorkspaceBytes(const Card& card, const AttentionGradientArgs& args,
                                       size_t max_score_bytes = kMaxScoreBytes);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_TRAINING_H_
