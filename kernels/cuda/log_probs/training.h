// Logprobs of training's rows, their gradients, and the losses, on a GPU (C14).
//
// Every launcher puts its kernels on the stream and takes the arguments of its op in
// kernels/training_ops.h; all pointers are to GPU memory. It gives the oracle's bits for every
// shape and alignment, and is fast if rows are multiples of 16 bytes. INVALID_ARGUMENT: a
// vocabulary beyond kMaxDeviceVocab. INTERNAL: CUDA refused a launch.
#ifndef ISOBIT_KERNELS_CUDA_LOG_PROBS_TRAINING_H_
#define ISOBIT_KERNELS_CUDA_LOG_PROBS_TRAINING_H_

#include <cstddef>

#include "absl/status/status.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/training_ops.h"

namespace isobit::cuda {

// Rows without a filter cost what serving's do; one that might have a filter, as told by the
// pointers of args.sampling, costs a launch more. last_z may be +0 where the oracle has -0. Of a
// row without filters in which a finite logit becomes a z of -inf (temperatures near 0), `last_id`
// is -1 all the same; LaunchLogProbGradient leaves such tokens out. workspace:
// TrainingLogProbsWorkspaceBytes, a multiple of 16.
size_t TrainingLogProbsWorkspaceBytes(const TrainingLogProbsArgs& args);
absl::Status LaunchTrainingLogProbs(const TrainingLogProbsArgs& args, std::byte* workspace,
                                    const Stream& stream);

absl::Status LaunchLogProbGradient(const LogProbGradientArgs& args, const Stream& stream);

// INVALID_ARGUMENT: as CheckBounds.
absl::Status LaunchPolicyLoss(const PolicyLossArgs& args, const Stream& stream);
absl::Status LaunchLossFunction(const LossFunctionArgs& args, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LOG_PROBS_TRAINING_H_
