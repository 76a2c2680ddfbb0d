// See row_ops.h.
#include "kernels/cpu/row_ops.h"

#include <algorithm>

#include "kernels/contract/row_functions.h"

namespace isobit::cpu {

void Embedding(const EmbeddingArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    std::copy_n(a.table + a.ids[r] * a.hidden, a.hidden, a.out + r * a.hidden);
  }
}

void RmsNorm(const RmsNormArgs& a, const RowKernels& rows, ThreadPool& pool) {
  pool.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      Bf16* residual = a.residual + r * a.hidden;
      if (a.sum != nullptr) {
        rows.add_residual(residual, a.sum + r * a.hidden, a.bias, a.hidden);
      }
      const float inverse =
          contract::InverseRms(rows.sum_of_squares(residual, a.hidden), a.hidden, a.eps);
      rows.normalise(residual, inverse, a.weight, a.out + r * a.hidden, a.hidden);
    }
  });
}

void SwiGlu(const SwiGluArgs& a, const RowKernels& rows, ThreadPool& pool) {
  pool.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const Bf16* gate = a.gate_up + r * 2 * a.columns;
      rows.swiglu(gate, gate + a.columns, a.out + r * a.columns, a.columns);
    }
  });
}

}  // namespace isobit::cpu
