// The optimizer and the digest of weights.
#include "kernels/contract/gradients.h"
#include "kernels/contract/row_functions.h"
#include "kernels/oracle/kernels.h"

namespace isobit::oracle {

absl::Status Run(const WeightSumsArgs& a, Context& /*context*/) {
  AddWeightSums(a.from, a.part, a.sums);
  return absl::OkStatus();
}

absl::Status Run(const SquareSumsArgs& a, Context& /*context*/) {
  for (int64_t r = 0; r < a.rows; ++r) {
    contract::TreeSum64 tree;
    for (int64_t c = 0; c < a.columns; c += contract::kNormLeaf) {
      float leaf[contract::kNormLeaf] = {};
      for (int64_t i = 0; i < contract::kNormLeaf && c + i < a.columns; ++i) {
        leaf[i] = a.x[r * a.columns + c + i];
      }
      tree.Push(contract::SquareLeaf(leaf));
    }
    a.sums[r] = tree.Total();
  }
  return absl::OkStatus();
}

absl::Status Run(const TreeSum64Args& a, Context& /*context*/) {
  contract::TreeSum64 tree;
  for (int64_t i = 0; i < a.count; ++i) tree.Push(a.x[i]);
  *a.sum = tree.Total();
  return absl::OkStatus();
}

absl::Status Run(const AdamWArgs& a, Context& /*context*/) {
  for (int64_t i = 0; i < a.count; ++i) {
    const contract::AdamWState next =
        contract::StepAdamW({a.parameter[i], a.m[i], a.v[i]}, a.gradient[i], a.step);
    a.parameter[i] = next.parameter;
    a.m[i] = next.m;
    a.v[i] = next.v;
    if (a.working != nullptr) a.working[i] = contract::FloatToBf16(next.parameter);
  }
  return absl::OkStatus();
}

absl::Status Run(const DitherArgs& a, Context& /*context*/) {
  for (int64_t i = 0; i < a.count; ++i) {
    const uint64_t at = a.first + static_cast<uint64_t>(i);
    const contract::PhiloxBlock block =
        contract::DitherNoise(a.step, a.moment, at / contract::kDitherWidth);
    a.out[i] = contract::DitherBf16(a.x[i], contract::DitherOf(block, at));
  }
  return absl::OkStatus();
}

}  // namespace isobit::oracle
