// The scalar definition of the linear and row-wise ops. Attention and sampling have files of their
// own.
#include "kernels/oracle/oracle_ops.h"

#include <algorithm>
#include <vector>

#include "kernels/contract/mma16.h"
#include "kernels/contract/row_functions.h"
#include "kernels/contract/vanilla.h"
#include "kernels/host_ops.h"
#include "kernels/oracle/attention.h"
#include "kernels/oracle/log_probs.h"
#include "kernels/plain_weight_packer.h"

namespace isobit {
namespace {

// One output element: the sum of its leaves, before bias and rounding.
float LeafDot(const LinearShape& shape, const Bf16* x, const Bf16* w) {
  float sums[contract::kLeaves] = {};
  for (int l = 0; l < shape.num_leaves; ++l) {
    const int64_t begin = shape.bounds[l];
    sums[l] = contract::DotChain(0.0f, x + begin, w + begin, shape.bounds[l + 1] - begin);
  }
  return shape.sum == contract::LeafSum::kTree ? contract::TreeOf(sums, shape.num_leaves)
                                               : contract::ChainOf(sums, shape.num_leaves);
}

// The same product in mode kVanilla: the k16 steps of all leaves, cut anew into as many splits as
// the batch asks for.
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

class OracleOps final : public HostOps {
 public:
  const char* name() const override { return "oracle"; }

  const WeightPacker& packer() const override {
    static const PlainWeightPacker packer;
    return packer;
  }

  absl::Status Embedding(const EmbeddingArgs& a) override {
    for (int64_t r = 0; r < a.rows; ++r) {
      std::copy_n(a.table + a.ids[r] * a.hidden, a.hidden, a.out + r * a.hidden);
    }
    return absl::OkStatus();
  }

  absl::Status RmsNorm(const RmsNormArgs& a) override {
    for (int64_t r = 0; r < a.rows; ++r) {
      Bf16* residual = a.residual + r * a.hidden;
      if (a.sum != nullptr) {
        for (int64_t i = 0; i < a.hidden; ++i) {
          const float bias = a.bias != nullptr ? a.bias[i] : 0.0f;
          residual[i] = contract::AddResidual(residual[i], a.sum[r * a.hidden + i], bias);
        }
      }
      const float inverse =
          contract::InverseRms(contract::SumOfSquares(residual, a.hidden), a.hidden, a.eps);
      for (int64_t i = 0; i < a.hidden; ++i) {
        a.out[r * a.hidden + i] = contract::Normalise(residual[i], inverse, a.weight[i]);
      }
    }
    return absl::OkStatus();
  }

  absl::Status SwiGlu(const SwiGluArgs& a) override {
    for (int64_t r = 0; r < a.rows; ++r) {
      const Bf16* gate = a.gate_up + r * 2 * a.columns;
      for (int64_t i = 0; i < a.columns; ++i) {
        a.out[r * a.columns + i] = contract::SwiGlu(gate[i], gate[a.columns + i]);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Qkv(const QkvArgs& a) override {
    oracle::PrepareQkv(a);
    return absl::OkStatus();
  }

  absl::Status Attention(const AttentionArgs& a) override {
    oracle::Attend(a);
    return absl::OkStatus();
  }

  absl::Status Reduce(const ReduceArgs& a) override {
    std::vector<float> values(static_cast<size_t>(a.num_ranks));
    for (int64_t i = a.begin; i < a.end; ++i) {
      for (int r = 0; r < a.num_ranks; ++r) values[static_cast<size_t>(r)] = a.partials[r][i];
      switch (a.mode) {
        case NumericsMode::kTree:
          a.out[i] = contract::TreeOf(values.data(), a.num_ranks);
          break;
        case NumericsMode::kBatchInvariant:
          a.out[i] = contract::HopSum(values.data(), a.num_ranks, 0);
          break;
        case NumericsMode::kVanilla:
          a.out[i] = contract::HopSum(values.data(), a.num_ranks,
                                      contract::RingStart(i, a.count, a.num_ranks));
          break;
      }
    }
    return absl::OkStatus();
  }

  absl::Status LogProbs(const LogProbArgs& a) override {
    for (int64_t r = 0; r < a.num_rows; ++r) {
      oracle::ComputeLogProbs(a.logits + r * a.ld, a.vocab, a.requests[r], a.results[r]);
    }
    return absl::OkStatus();
  }

 protected:
  absl::Status Product(const LinearArgs& a) override {
    const LinearShape& shape = a.weight.shape;
    const auto* weight = reinterpret_cast<const Bf16*>(a.weight.packed);
    for (int64_t m = 0; m < a.m; ++m) {
      for (int64_t n = 0; n < shape.n; ++n) {
        const Bf16* x = a.x + m * a.ldx;
        const Bf16* w = weight + n * shape.k;
        float y =
            a.mode == NumericsMode::kVanilla ? VanillaDot(shape, a.m, x, w) : LeafDot(shape, x, w);
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
};

}  // namespace

std::unique_ptr<Ops> MakeOracleOps() { return std::make_unique<OracleOps>(); }

}  // namespace isobit
