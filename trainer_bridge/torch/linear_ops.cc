// Linear layers and their gradients.
#include <torch/csrc/stable/ops.h>

#include "absl/strings/str_cat.h"
#include "kernels/contract/leaf_plan.h"
#include "trainer_bridge/torch/call.h"
#include "trainer_bridge/torch/operators.h"

namespace isobit::bridge {
namespace {

StackedWeight StackOf(const Call& call, const Tensors& weights) {
  call.Require(!weights.empty() && weights.size() <= kMaxParts, "weights", "1 to 3 matrices",
               absl::StrCat(weights.size()));
  StackedWeight stack;
  stack.parts = static_cast<int>(weights.size());
  stack.columns = call.MatrixShape("weights", weights[0]).second;
  for (size_t i = 0; i < weights.size(); ++i) {
    stack.rows[i] = call.MatrixShape("weights", weights[i]).first;
    stack.data[i] = call.In<Bf16>("weights", weights[i], {stack.rows[i], stack.columns});
  }
  return stack;
}

// The parts' biases, one after the other, in fp32.
Tensor JoinBiases(const Call& call, const Tensors& biases, const StackedWeight& weight,
                  const float** data) {
  float* joined = nullptr;
  Tensor out = call.New<float>({weight.n()}, &joined);
  int64_t begin = 0;
  for (size_t i = 0; i < biases.size(); ++i) {
    call.In<Bf16>("biases", biases[i], {weight.rows[i]});
    Tensor part = torch::stable::narrow(out, 0, begin, weight.rows[i]);
    torch::stable::copy_(part, biases[i]);
    begin += weight.rows[i];
  }
  *data = joined;
  return out;
}

Tensor Linear(const Tensor& x, const Tensors& weights, const Tensors& biases, const Bounds& packs) {
  const Call call("linear", x);
  call.Require(biases.empty() || biases.size() == weights.size(), "biases",
               absl::StrCat("none or ", weights.size()), absl::StrCat(biases.size()));
  StackedLinearArgs a;
  a.weight = StackOf(call, weights);
  a.m = call.MatrixShape("x", x).first;
  call.Packs(packs, a.m);
  a.x = call.In<Bf16>("x", x, {a.m, a.weight.columns});
  a.ldx = a.weight.columns;
  a.leaves = contract::PlanColumns(a.weight.columns);
  MaybeTensor bias;  // holds the memory
  if (!biases.empty()) bias = JoinBiases(call, biases, a.weight, &a.bias);
  Tensor out = call.New<Bf16>({a.m, a.weight.n()}, &a.bf16_out);
  call.Run(a);
  return out;
}

Tensor LinearAdd(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                 const Tensor& residual, int64_t unit, const Bounds& packs) {
  const Call call("linear_add", x);
  StackedLinearArgs a;
  a.weight = StackOf(call, {weight});
  a.m = call.MatrixShape("x", x).first;
  call.Packs(packs, a.m);
  call.Require(unit > 0, "unit", "at least 1 column", absl::StrCat(unit));
  a.x = call.In<Bf16>("x", x, {a.m, a.weight.columns});
  a.ldx = a.weight.columns;
  a.leaves = contract::PlanLeaves(a.weight.columns, unit);
  a.sum = contract::LeafSum::kTree;
  MaybeTensor joined;
  if (bias) joined = JoinBiases(call, {*bias}, a.weight, &a.bias);
  a.residual = call.In<Bf16>("residual", residual, {a.m, a.weight.n()});
  Tensor out = call.New<Bf16>({a.m, a.weight.n()}, &a.bf16_out);
  call.Run(a);
  return out;
}

Tensor LinearBackwardInput(const Tensor& dy, const Tensors& weights) {
  const Call call("linear_backward_input", dy);
  InputGradientArgs a;
  a.weight = StackOf(call, weights);
  a.m = call.MatrixShape("dy", dy).first;
  a.dy = call.In<Bf16>("dy", dy, {a.m, a.weight.n()});
  a.lddy = a.weight.n();
  Tensor dx = call.New<Bf16>({a.m, a.weight.columns}, &a.dx);
  call.Run(a);
  return dx;
}

Tensors LinearBackwardWeights(const Tensor& dy, const Tensor& x, const std::vector<int64_t>& rows,
                              const Bounds& packs) {
  const Call call("linear_backward_weights", dy);
  call.Require(!rows.empty() && rows.size() <= kMaxParts, "rows", "1 to 3 numbers",
               absl::StrCat(rows.size()));
  const auto [m, columns] = call.MatrixShape("x", x);
  WeightGradientArgs a;
  a.parts = static_cast<int>(rows.size());
  a.columns = columns;
  int64_t n = 0;
  Tensors dw;
  for (size_t i = 0; i < rows.size(); ++i) {
    call.Require(rows[i] > 0, "rows", "at least 1", absl::StrCat(rows[i]));
    a.part_rows[i] = rows[i];
    n += rows[i];
    dw.push_back(call.New<float>({rows[i], columns}, &a.dw[i]));
  }
  a.dy = call.In<Bf16>("dy", dy, {m, n});
  a.lddy = n;
  a.x = call.In<Bf16>("x", x, {m, columns});
  a.ldx = columns;
  a.packs = call.Packs(packs, m);
  call.Run(a);
  return dw;
}

Tensor ColumnSums(const Tensor& x, const Bounds& packs) {
  const Call call("column_sums", x);
  const auto [rows, columns] = call.MatrixShape("x", x);
  ColumnSumsArgs a;
  a.x = call.In<Bf16>("x", x, {rows, columns});
  a.ldx = columns;
  a.columns = columns;
  a.packs = call.Packs(packs, rows);
  Tensor out = call.New<float>({columns}, &a.out);
  call.Run(a);
  return out;
}

constexpr Operator kOperators[] = {
    {"linear(Tensor x, Tensor[] weights, Tensor[] biases, int[] packs) -> Tensor",
     TORCH_BOX(&Linear), "bf16(x.shape[0], sum(w.shape[0] for w in weights))"},
    {"linear_add(Tensor x, Tensor weight, Tensor? bias, Tensor residual, int unit, int[] packs)"
     " -> Tensor",
     TORCH_BOX(&LinearAdd), "like(residual)"},
    {"linear_backward_input(Tensor dy, Tensor[] weights) -> Tensor",
     TORCH_BOX(&LinearBackwardInput), "bf16(dy.shape[0], weights[0].shape[1])"},
    {"linear_backward_weights(Tensor dy, Tensor x, int[] rows, int[] packs) -> Tensor[]",
     TORCH_BOX(&LinearBackwardWeights), "[fp32(n, x.shape[1]) for n in rows]"},
    {"column_sums(Tensor x, int[] packs) -> Tensor", TORCH_BOX(&ColumnSums), "fp32(x.shape[1])"},
};

}  // namespace

ISOBIT_OPERATORS(kOperators)

}  // namespace isobit::bridge
