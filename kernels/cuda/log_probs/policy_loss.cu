// The losses of tokens and their gradients (C14).
#include <cstdint>

#include "common/base/round_up.h"
#include "kernels/contract/gradients.h"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/log_probs/training.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) PolicyLossKernel(const PolicyLossArgs a) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.tokens) return;
  const float logprob = a.logprobs[i];
  contract::TokenLoss loss = a.old_logprobs == nullptr
                                 ? contract::PolicyGradientLoss(logprob, a.advantages[i])
                                 : contract::ClippedLoss(logprob, a.old_logprobs[i],
                                                         a.advantages[i], a.clip_low, a.clip_high);
  if (a.reference_logprobs != nullptr) {
    loss = contract::AddReferenceKl(loss, logprob, a.reference_logprobs[i], a.kl);
  }
  a.values[i] = contract::Mul(loss.value, a.weights[i]);
  a.gradients[i] = contract::Mul(loss.gradient, a.weights[i]);
}

}  // namespace

absl::Status LaunchPolicyLoss(const PolicyLossArgs& args, const Stream& stream) {
  const auto blocks = static_cast<unsigned>(CeilDiv(args.tokens, int64_t{kThreads}));
  return Launch(PolicyLossKernel, {.blocks = dim3(blocks), .threads = dim3(kThreads)}, stream,
                args);
}

}  // namespace isobit::cuda
