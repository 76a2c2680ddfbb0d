// The row-wise ops of the forward pass.

#include <algorithm>

#include "kernels/contract/row_functions.h"
#include "kernels/cpu/context.h"

namespace isobit::cpu {

absl::Status Run(const EmbeddingArgs& a, Context& /*context*/) {
  for (int64_t r = 0; r < a.rows; ++r) {
    std::copy_n(a.table + a.ids[r] * a.hidden, a.hidden, a.out + r * a.hidden);
  }
  return absl::OkStatus();
}

absl::Status Run(const RmsNormArgs& a, Context& context) {
  context.pool.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      Bf16* residual = a.residual + r * a.hidden;
      if (a.sum != nullptr) {
        context.rows.add_residual(residual, a.sum + r * a.hidden, a.bias, a.hidden);
      }
      const float inverse =
          contract::InverseRms(context.rows.sum_of_squares(residual, a.hidden), a.hidden, a.eps);
      context.rows.normalise(residual, inverse, a.weight, a.out + r * a.hidden, a.hidden);
    }
  });
  return absl::OkStatus();
}

absl::Status Run(const SwiGluArgs& a, Context& context) {
  context.pool.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const Bf16* gate = a.gate_up + r * 2 * a.columns;
      context.rows.swiglu(gate, gate + a.columns, a.out + r * a.columns, a.columns);
    }
  });
  return absl::OkStatus();
}

}  // namespace isobit::cpu
