// The scalar definition of the linear and row-wise ops. Attention and sampling have files of their
// own.
#include "kernels/oracle/oracle_ops.h"

#include <algorithm>
#include <vector>

#include "kernels/contract/mma16.h"
#include "kernels/contract/row_functions.h"
#include "kernels/host_ops.h"
#include "kernels/oracle/attention.h"
#include "kernels/oracle/log_probs.h"
#include "kernels/plain_weight_packer.h"

namespace isobit {

const WeightPacker& OracleOps::packer() const {
  static const PlainWeightPacker packer;
  return packer;
}

absl::Status OracleOps::Embedding(const EmbeddingArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    std::copy_n(a.table + a.ids[r] * a.hidden, a.hidden, a.out + r * a.hidden);
  }
  return absl::OkStatus();
}

absl::Status OracleOps::RmsNorm(const RmsNormArgs& a) {
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

absl::Status OracleOps::SwiGlu(const SwiGluArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const Bf16* gate = a.gate_up + r * 2 * a.columns;
    for (int64_t i = 0; i < a.columns; ++i) {
      a.out[r * a.columns + i] = contract::SwiGlu(gate[i], gate[a.columns + i]);
    }
  }
  return absl::OkStatus();
}

absl::Status OracleOps::Qkv(const QkvArgs& a) {
  oracle::PrepareQkv(a);
  return absl::OkStatus();
}

absl::Status OracleOps::Attention(const AttentionArgs& a) {
  oracle::Attend(a);
  return absl::OkStatus();
}

absl::Status OracleOps::Reduce(const ReduceArgs& a) {
  std::vector<float> values(static_cast<size_t>(a.num_ranks));
  for (int64_t i = a.begin; i < a.end; ++i) {
    for (int r = 0; r < a.num_ranks; ++r) values[static_cast<size_t>(r)] = a.partials[r][i];
    a.out[i] = SumOf(values.data(), i, a);
  }
  return absl::OkStatus();
}

float OracleOps::SumOf(const float* values, int64_t /*i*/, const ReduceArgs& a) const {
  return contract::TreeOf(values, a.num_ranks);
}

absl::Status OracleOps::LogProbs(const LogProbArgs& a) {
  for (int64_t r = 0; r < a.num_rows; ++r) {
    oracle::ComputeLogProbs(a.logits + r * a.ld, a.vocab, a.requests[r], a.results[r]);
  }
  return absl::OkStatus();
}

absl::Status OracleOps::Product(const LinearArgs& a) {
  const LinearShape& shape = a.weight.shape;
  const auto* weight = reinterpret_cast<const Bf16*>(a.weight.packed);
  for (int64_t m = 0; m < a.m; ++m) {
    for (int64_t n = 0; n < shape.n; ++n) {
      const Bf16* x = a.x + m * a.ldx;
      const Bf16* w = weight + n * shape.k;
      float y = Dot(shape, a.m, x, w);
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

float OracleOps::Dot(const LinearShape& shape, int64_t /*m*/, const Bf16* x, const Bf16* w) const {
  float sums[contract::kLeaves] = {};
  for (int l = 0; l < shape.num_leaves; ++l) {
    const int64_t begin = shape.bounds[l];
    sums[l] = contract::DotChain(0.0f, x + begin, w + begin, shape.bounds[l + 1] - begin);
  }
  return shape.sum == contract::LeafSum::kTree ? contract::TreeOf(sums, shape.num_leaves)
                                               : contract::ChainOf(sums, shape.num_leaves);
}

}  // namespace isobit
