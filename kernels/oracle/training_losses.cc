// Losses of tokens, what other losses are made of, and their sums (C14).
#include <cstdint>

#include "kernels/contract/losses.h"
#include "kernels/contract/row_functions.h"
#include "kernels/oracle/kernels.h"

namespace isobit::oracle {
namespace {

float SumOf(const float* x, int64_t count) {
  contract::TreeSum tree;
  for (int64_t i = 0; i < count; ++i) tree.Push(x[i]);
  return tree.Total();
}

}  // namespace

absl::Status Run(const PolicyLossArgs& a, Context& /*context*/) {
  if (const absl::Status status = CheckBounds(a); !status.ok()) return status;
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

absl::Status Run(const LossFunctionArgs& a, Context& /*context*/) {
  for (int64_t i = 0; i < a.count; ++i) {
    const contract::ValueAndGradient result = contract::Evaluate(a.function, a.x[i]);
    a.values[i] = result.value;
    a.gradients[i] = result.gradient;
  }
  return absl::OkStatus();
}

absl::Status Run(const TreeSumArgs& a, Context& /*context*/) {
  *a.sum = SumOf(a.x, a.count);
  return absl::OkStatus();
}

absl::Status Run(const SequenceSumsArgs& a, Context& /*context*/) {
  for (int64_t i = 0; i < a.sequences; ++i) {
    a.sums[i] = SumOf(a.x + a.bounds[i], a.bounds[i + 1] - a.bounds[i]);
  }
  return absl::OkStatus();
}

}  // namespace isobit::oracle
