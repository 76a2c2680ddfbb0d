// Losses of tokens, what other losses are made of, and their sums (C14).
#include "kernels/contract/losses.h"

#include "common/base/status_macros.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cpu/context.h"

namespace isobit::cpu {
namespace {

float TreeSumOf(const float* x, int64_t count) {
  contract::TreeSum tree;
  for (int64_t i = 0; i < count; ++i) tree.Push(x[i]);
  return tree.Total();
}

}  // namespace

absl::Status Run(const PolicyLossArgs& a, Context& /*context*/) {
  ISOBIT_RETURN_IF_ERROR(CheckBounds(a));
  for (int64_t i = 0; i < a.tokens; ++i) {
    contract::ValueAndGradient loss =
        a.old_logprobs == nullptr ? contract::PolicyGradientLoss(a.logprobs[i], a.advantages[i])
                                  : contract::ClippedLoss(a.logprobs[i], a.old_logprobs[i],
                                                          a.advantages[i], a.clip_low, a.clip_high);
    if (a.reference_logprobs != nullptr) {
      loss = contract::AddReferenceKl(loss, a.logprobs[i], a.reference_logprobs[i], a.kl);
    }
    a.values[i] = contract::Mul(loss.value, a.weights[i]);
    a.gradients[i] = contract::Mul(loss.gradient, a.weights[i]);
  }
  return absl::OkStatus();
}

absl::Status Run(const LossFunctionArgs& a, Context& context) {
  context.pool.ParallelFor(a.count, kElementGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const contract::ValueAndGradient result = contract::Evaluate(a.function, a.x[i]);
      a.values[i] = result.value;
      a.gradients[i] = result.gradient;
    }
  });
  return absl::OkStatus();
}

absl::Status Run(const TreeSumArgs& a, Context& /*context*/) {
  *a.sum = TreeSumOf(a.x, a.count);
  return absl::OkStatus();
}

absl::Status Run(const SequenceSumsArgs& a, Context& context) {
  context.pool.ParallelFor(a.sequences, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      a.sums[i] = TreeSumOf(a.x + a.bounds[i], a.bounds[i + 1] - a.bounds[i]);
    }
  });
  return absl::OkStatus();
}

}  // namespace isobit::cpu
