// Logprobs of training's rows, their gradients, and the losses, on a GPU (C14).
//
// Every launcher enqueues its kernels on the stream and takes the arguments of its op in
// kernels/training_ops.h. All pointers are to GPU memory. It gives the oracle's bits for every
// shape and alignment, and is fast if rows are multiples of 16 bytes. INVALID_ARGUMENT: the
// vocabulary exceeds kMaxDeviceVocab. INTERNAL: CUDA refused a launch.
#ifndef ISOBIT_KERNELS_CUDA_LOG_PROBS_TRAINING_H_
#define ISOBIT_KERNELS_CUDA_LOG_PROBS_TRAINING_H_

#include <cstddef>

#include "absl/status/status.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/training_ops.h"

namespace isobit::cuda {

// Rows without a filter cost as much as in serving; if a row may have a filter, as the pointers of
// args.sampling say, one more launch is needed. last_z may be +0 where the oracle has -0. In a row
// without filters, if a finite logit becomes a z of -inf (temperatures near 0), `last_id` is still
// -1; LaunchLogProbGradient skips such tokens. workspace: TrainingLogProbsWorkspaceBytes bytes, at
// a multiple of 16.
size_t TrainingLogProbsWorkspaceBytes(const TrainingLogProbsArgs& args);
absl::Status LaunchTrainingLogProbs(const TrainingLogProbsArgs& args, std::byte* workspace,
                                    const Stream& stream);

absl::Status LaunchLogProbGradient(const LogProbGradientArgs& args, const Stream& stream);

// INVALID_ARGUMENT: CheckBounds fails.
absl::Status LaunchPolicyLoss(const PolicyLossArgs& args, const Stream& stream);
absl::Status LaunchLossFunction(const LossFunctionArgs& args, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LOG_PROBS_TRAINING_H_
