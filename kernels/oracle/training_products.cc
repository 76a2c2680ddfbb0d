// The products of training: linear layers, and the gradients of their inputs, weights and biases
// (C3, C11).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/contract/mma16.h"
#include "kernels/contract/row_functions.h"
#include "kernels/oracle/kernels.h"
#include "kernels/oracle/pack_sums.h"

namespace isobit::oracle {
namespace {

// The parts as one matrix [n, columns].
std::vector<Bf16> Stack(const StackedWeight& weight) {
  std::vector<Bf16> w;
  for (int i = 0; i < weight.parts; ++i) {
    w.insert(w.end(), weight.data[i], weight.data[i] + weight.rows[i] * weight.columns);
  }
  return w;
}

// [columns, rows] of x [rows, columns], leading dimension ld.
std::vector<Bf16> Transposed(const Bf16* x, int64_t ld, int64_t rows, int64_t columns) {
  std::vector<Bf16> out(static_cast<size_t>(rows * columns));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) out[static_cast<size_t>(c * rows + r)] = x[r * ld + c];
  }
  return out;
}

}  // namespace

absl::Status Run(const StackedLinearArgs& a, Context& context) {
  const std::vector<Bf16> w = Stack(a.weight);
  const int64_t n = a.weight.n();
  LinearArgs linear;
  linear.x = a.x;
  linear.ldx = a.ldx;
  linear.m = a.m;
  linear.ldy = n;
  linear.weight.packed = reinterpret_cast<const std::byte*>(w.data());
  linear.weight.shape = {
      .n = n, .k = a.weight.columns, .num_leaves = contract::kLeaves, .sum = a.sum};
  std::ranges::copy(a.leaves.bounds, linear.weight.shape.bounds);
  if (a.residual == nullptr) {
    linear.bias = a.bias;
    linear.bf16_out = a.bf16_out;
    linear.fp32_out = a.fp32_out;
    return Run(linear, context);
  }
  std::vector<float> sums(static_cast<size_t>(a.m * n));
  linear.fp32_out = sums.data();
  const absl::Status status = Run(linear, context);
  if (!status.ok()) return status;
  for (int64_t i = 0; i < a.m * n; ++i) {
    const float bias = a.bias != nullptr ? a.bias[i % n] : 0.0f;
    a.bf16_out[i] = contract::AddResidual(a.residual[i], sums[static_cast<size_t>(i)], bias);
  }
  return absl::OkStatus();
}

absl::Status Run(const InputGradientArgs& a, Context& /*context*/) {
  const int64_t n = a.weight.n();
  const int64_t columns = a.weight.columns;
  const std::vector<Bf16> w = Transposed(Stack(a.weight).data(), columns, n, columns);
  for (int64_t r = 0; r < a.m; ++r) {
    for (int64_t k = 0; k < columns; ++k) {
      a.dx[r * columns + k] =
          contract::FloatToBf16(contract::DotChain(0.0f, a.dy + r * a.lddy, w.data() + k * n, n));
    }
  }
  return absl::OkStatus();
}

absl::Status Run(const WeightGradientArgs& a, Context& /*context*/) {
  const int64_t rows = a.packs.back();
  const int64_t n = a.part_rows[0] + a.part_rows[1] + a.part_rows[2];
  const std::vector<Bf16> dy = Transposed(a.dy, a.lddy, rows, n);
  const std::vector<Bf16> x = Transposed(a.x, a.ldx, rows, a.columns);
  int64_t row = 0;  // of the weight
  for (int part = 0; part < a.parts; ++part) {
    for (int64_t i = 0; i < a.part_rows[part] * a.columns; ++i) {
      const Bf16* dy_row = dy.data() + (row + i / a.columns) * rows;
      const Bf16* x_row = x.data() + i % a.columns * rows;
      const float start = a.continues ? a.dw[part][i] : 0.0f;
      a.dw[part][i] = SumOverPacks(a.packs, [&](int64_t begin, int64_t end) {
        return contract::DotChain(start, dy_row + begin, x_row + begin, end - begin);
      });
    }
    row += a.part_rows[part];
  }
  return absl::OkStatus();
}

absl::Status Run(const ColumnSumsArgs& a, Context& /*context*/) {
  for (int64_t c = 0; c < a.columns; ++c) {
    a.out[c] = SumOverPacks(a.packs, [&](int64_t begin, int64_t end) {
      return ColumnSum(begin, end,
                       [&](int64_t r) { return contract::Bf16ToFloat(a.x[r * a.ldx + c]); });
    });
  }
  return absl::OkStatus();
}

}  // namespace isobit::oracle
