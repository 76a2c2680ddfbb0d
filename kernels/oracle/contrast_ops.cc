// The contrast modes in scalar form (contract/vanilla.h), and the choice among the modes.
#include <algorithm>

#include "kernels/contract/mma16.h"
#include "kernels/contract/vanilla.h"
#include "kernels/oracle/oracle_ops.h"

namespace isobit {
namespace {

class BatchInvariantOracle final : public OracleOps {
  float SumOf(const float* values, int64_t /*i*/, const ReduceArgs& a) const override {
    return contract::HopSum(values, a.num_ranks, 0);
  }
};

class VanillaOracle final : public OracleOps {
  float SumOf(const float* values, int64_t i, const ReduceArgs& a) const override {
    return contract::HopSum(values, a.num_ranks, contract::RingStart(i, a.count, a.num_ranks));
  }
  float Dot(const LinearShape& shape, int64_t m, const Bf16* x, const Bf16* w) const override;
};

// The k16 steps of all leaves, cut again into the number of splits that VanillaSplits gives.
float VanillaOracle::Dot(const LinearShape& shape, int64_t m, const Bf16* x, const Bf16* w) const {
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

}  // namespace

std::unique_ptr<Ops> MakeOracleOps(NumericsMode mode) {
  switch (mode) {
    case NumericsMode::kTree:
      break;
    case NumericsMode::kBatchInvariant:
      return std::make_unique<BatchInvariantOracle>();
    case NumericsMode::kVanilla:
      return std::make_unique<VanillaOracle>();
  }
  return std::make_unique<OracleOps>();
}

std::unique_ptr<Ops> MakeOracleOps() { return MakeOracleOps(NumericsMode::kTree); }

}  // namespace isobit
