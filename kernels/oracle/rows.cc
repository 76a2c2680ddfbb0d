// The row-wise ops of the forward pass.
#include <algorithm>

#include "kernels/contract/row_functions.h"
#include "kernels/oracle/kernels.h"

namespace isobit::oracle {

absl::Status Run(const EmbeddingArgs& a, Context& /*context*/) {
  for (int64_t r = 0; r < a.rows; ++r) {
    std::copy_n(a.table + a.ids[r] * a.hidden, a.hidden, a.out + r * a.hidden);
  }
  return absl::OkStatus();
}

absl::Status Run(const RmsNormArgs& a, Context& /*context*/) {
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

absl::Status Run(const SwiGluArgs& a, Context& /*context*/) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const Bf16* gate = a.gate_up + r * 2 * a.columns;
    for (int64_t i = 0; i < a.columns; ++i) {
      a.out[r * a.columns + i] = contract::SwiGlu(gate[i], gate[a.columns + i]);
    }
  }
  return absl::OkStatus();
}

}  // namespace isobit::oracle
