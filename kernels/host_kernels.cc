// Copies of KV pages, losses and their sums, in host memory.
#include "kernels/host_kernels.h"

#include "kernels/contract/losses.h"
#include "kernels/contract/row_functions.h"

namespace isobit {
namespace {

float SumOf(const float* x, int64_t count) {
  contract::TreeSum tree;
  for (int64_t i = 0; i < count; ++i) tree.Push(x[i]);
  return tree.Total();
}

}  // namespace

void CopyHostPages(const CopyPagesArgs& args) {
  for (const PageCopy& copy : args.copies) {
    for (int64_t plane = 0; plane < args.num_planes; ++plane) {
      Bf16* const pages = args.planes + plane * args.plane_stride;
      std::copy_n(pages + copy.from * args.page_elements, args.page_elements,
                  pages + copy.to * args.page_elements);
    }
  }
}

absl::Status RunOnHost(const PolicyLossArgs& a) {
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

absl::Status RunOnHost(const LossFunctionArgs& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    const contract::ValueAndGradient result = contract::Evaluate(a.function, a.x[i]);
    a.values[i] = result.value;
    a.gradients[i] = result.gradient;
  }
  return absl::OkStatus();
}

absl::Status RunOnHost(const TreeSumArgs& a) {
  *a.sum = SumOf(a.x, a.count);
  return absl::OkStatus();
}

absl::Status RunOnHost(const SequenceSumsArgs& a) {
  for (int64_t i = 0; i < a.sequences; ++i) {
    a.sums[i] = SumOf(a.x + a.bounds[i], a.bounds[i + 1] - a.bounds[i]);
  }
  return absl::OkStatus();
}

}  // namespace isobit
