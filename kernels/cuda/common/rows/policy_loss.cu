// The losses of tokens, and the functions that other losses are made of, with their gradients
// (C14).
#include <cstdint>

#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/contract/losses.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/ops/losses.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) PolicyLossKernel(const PolicyLossArgs a) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.tokens) return;
  const float logprob = a.logprobs[i];
  contract::ValueAndGradient loss =
      a.old_logprobs == nullptr ? contract::PolicyGradientLoss(logprob, a.advantages[i])
                                : contract::ClippedLoss(logprob, a.old_logprobs[i], a.advantages[i],
                                                        a.clip_low, a.clip_high);
  if (a.reference_logprobs != nullptr) {
    loss = contract::AddReferenceKl(loss, logprob, a.reference_logprobs[i], a.kl);
  }
  a.values[i] = contract::Mul(loss.value, a.weights[i]);
  a.gradients[i] = contract::Mul(loss.gradient, a.weights[i]);
}

__global__ void __launch_bounds__(kThreads) LossFunctionKernel(const LossFunctionArgs a) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.count) return;
  const contract::ValueAndGradient result = contract::Evaluate(a.function, a.x[i]);
  a.values[i] = result.value;
  a.gradients[i] = result.gradient;
}

Grid OneThreadEach(int64_t elements) {
  return {.blocks = dim3(static_cast<unsigned>(CeilDiv(elements, int64_t{kThreads}))),
          .threads = dim3(kThreads)};
}

}  // namespace

// INVALID_ARGUMENT: CheckBounds fails.
absl::Status Run(const PolicyLossArgs& args, const Stream& stream) {
  ISOBIT_RETURN_IF_ERROR(CheckBounds(args));
  return Launch(PolicyLossKernel, OneThreadEach(args.tokens), stream, args);
}

absl::Status Run(const LossFunctionArgs& args, const Stream& stream) {
  return Launch(LossFunctionKernel, OneThreadEach(args.count), stream, args);
}

}  // namespace isobit::cuda
