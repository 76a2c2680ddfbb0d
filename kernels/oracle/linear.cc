// Linear layers and sums over ranks, in the contract's order and in the orders that contrast with
// it (contract/vanilla.h).
#include <algorithm>
#include <vector>

#include "kernels/contract/mma16.h"
#include "kernels/contract/row_functions.h"
#include "kernels/contract/vanilla.h"
#include "kernels/host_kernels.h"
#include "kernels/oracle/kernels.h"

namespace isobit::oracle {
namespace {

float TreeDot(const LinearShape& shape, const Bf16* x, const Bf16* w) {
  float sums[contract::kLeaves] = {};
  for (int l = 0; l < shape.num_leaves; ++l) {
    const int64_t begin = shape.bounds[l];
    sums[l] = contract::DotChain(0.0f, x + begin, w + begin, shape.bounds[l + 1] - begin);
  }
  return shape.sum == contract::LeafSum::kTree ? contract::TreeOf(sums, shape.num_leaves)
                                               : contract::ChainOf(sums, shape.num_leaves);
}

// The k16 steps of all leaves, cut again into the number of splits that VanillaSplits gives.
float VanillaDot(const LinearShape& shape, int64_t m, const Bf16* x, const Bf16* w) {
  int64_t steps = 0;
  for (int l = 0; l < shape.num_leaves; ++l)
    steps += (shape.bounds[l + 1] - shape.bounds[l] + 15) / 16;
  const int splits = contract::VanillaSplits(m);
  float total = 0.0f;
  float split_sum = 0.0f;
  int64_t step = 0;
  int split = 0;
  for (int l = 0; l < shape.num_leaves; ++l) {
    for (int64_t k = shape.bounds[l]; k < shape.bounds[l + 1]; k += contract::kMmaK, ++step) {
      for (; step >= (split + 1) * steps / splits; ++split) {
        total = contract::Add(total, split_sum);
        split_sum = 0.0f;
      }
      const int64_t columns = std::min<int64_t>(contract::kMmaK, shape.bounds[l + 1] - k);
      split_sum = contract::DotChain(split_sum, x + k, w + k, columns);
    }
  }
  return contract::Add(total, split_sum);
}

absl::Status Product(const LinearArgs& a, NumericsMode mode) {
  const LinearShape& shape = a.weight.shape;
  const auto* weight = reinterpret_cast<const Bf16*>(a.weight.packed);
  for (int64_t m = 0; m < a.m; ++m) {
    for (int64_t n = 0; n < shape.n; ++n) {
      const Bf16* x = a.x + m * a.ldx;
      const Bf16* w = weight + n * shape.k;
      float y =
          mode == NumericsMode::kVanilla ? VanillaDot(shape, a.m, x, w) : TreeDot(shape, x, w);
      if (a.bias != nullptr) y = contract::Add(y, a.bias[n]);
      if (a.bf16_out != nullptr) {
        a.bf16_out[m * a.ldy + n] = contract::FloatToBf16(y);
      } else {
        a.fp32_out[m * a.ldy + n] = y;
      }
    }
  }
  return absl::OkStatus();
}

float SumOf(const float* values, int64_t i, const ReduceArgs& a, NumericsMode mode) {
  switch (mode) {
    case NumericsMode::kTree:
      break;
    case NumericsMode::kBatchInvariant:
      return contract::HopSum(values, a.num_ranks, 0);
    case NumericsMode::kVanilla:
      return contract::HopSum(values, a.num_ranks, contract::RingStart(i, a.count, a.num_ranks));
  }
  return contract::TreeOf(values, a.num_ranks);
}

}  // namespace

absl::Status Run(const LinearArgs& a, Context& context) {
  if (a.swiglu_out == nullptr) return Product(a, context.mode);
  return LinearThenSwiGlu(
      a, context.gate_up, [&](const LinearArgs& b) { return Product(b, context.mode); },
      [&](const SwiGluArgs& b) { return Run(b, context); });
}

absl::Status Run(const ReduceArgs& a, Context& context) {
  std::vector<float> values(static_cast<size_t>(a.num_ranks));
  for (int64_t i = a.begin; i < a.end; ++i) {
    for (int r = 0; r < a.num_ranks; ++r) values[static_cast<size_t>(r)] = a.partials[r][i];
    a.out[i] = SumOf(values.data(), i, a, context.mode);
  }
  return absl::OkStatus();
}

absl::Status Run(const CopyPagesArgs& a, Context& /*context*/) {
  CopyHostPages(a);
  return absl::OkStatus();
}

}  // namespace isobit::oracle
