// Square sums, for clipping; AdamW and its moments in bf16; sums of weights, for their digest.
#include <tuple>

#include "absl/strings/str_cat.h"
#include "trainer_bridge/torch/call.h"
#include "trainer_bridge/torch/operators.h"

namespace isobit::bridge {
namespace {

Tensor SquareSums(const Tensor& x) {
  const Call call("square_sums", x);
  SquareSumsArgs a;
  std::tie(a.rows, a.columns) = call.MatrixShape("x", x);
  a.x = call.In<float>("x", x, {a.rows, a.columns});
  if (a.columns == 0) return call.NewZeros<double>({a.rows}, &a.sums);
  Tensor sums = call.New<double>({a.rows}, &a.sums);
  call.Run(a);
  return sums;
}

Tensor WeightSums(const Tensor& block, int64_t tensor_columns, int64_t first_row,
                  int64_t first_column) {
  const Call call("weight_sums", block);
  WeightSumsArgs a;
  std::tie(a.from.rows, a.from.columns) = call.MatrixShape("block", block);
  a.from.stride = a.from.columns;
  const Shape shape = {a.from.rows, a.from.columns};
  if (block.scalar_type() == DtypeOf<float>()) {
    a.from.stored_as = StoredAs::kF32;
    a.from.values = call.In<float>("block", block, shape);
  } else {
    a.from.values = call.In<Bf16>("block", block, shape);
  }
  const int64_t end = first_column + a.from.columns;
  call.Require(first_row >= 0 && first_column >= 0 && first_column % 4 == 0 &&
                   (a.from.columns % 4 == 0 || end == tensor_columns) && end <= tensor_columns,
               "first_column",
               absl::StrCat("a multiple of 4 in [0, ", tensor_columns,
                            "), and so many columns or the end of the row"),
               absl::StrCat("columns ", first_column, " to ", end));
  a.part = {.first_row = first_row, .first_column = first_column, .tensor_columns = tensor_columns};
  int64_t* sums = nullptr;
  Tensor result = call.NewZeros<int64_t>({kWeightSums}, &sums);
  a.sums = reinterpret_cast<uint64_t*>(sums);
  if (block.numel() > 0) call.Run(a);
  return result;
}

Tensor TreeSum64(const Tensor& x) {
  const Call call("tree_sum64", x);
  TreeSum64Args a;
  a.count = call.Length("x", x);
  a.x = call.In<double>("x", x, {a.count});
  Tensor sum = call.New<double>({}, &a.sum);
  call.Run(a);
  return sum;
}

void AdamW(const Tensor& parameter, const Tensor& m, const Tensor& v, const Tensor& gradient,
           const MaybeTensor& working, const std::vector<double>& factors) {
  const Call call("adamw", parameter);
  call.Require(factors.size() == 8, "factors", "8 values", absl::StrCat(factors.size()));
  const auto factor = [&](size_t i) { return static_cast<float>(factors[i]); };
  const auto sizes = parameter.sizes();
  const Shape shape(sizes.begin(), sizes.end());
  AdamWArgs a;
  a.count = parameter.numel();
  a.parameter = call.InOut<float>("parameter", parameter, shape);
  a.m = call.InOut<float>("m", m, shape);
  a.v = call.InOut<float>("v", v, shape);
  a.gradient = call.In<float>("gradient", gradient, shape);
  if (working) a.working = call.InOut<Bf16>("working", *working, shape);
  a.step = {.keep = factor(0),
            .beta1 = factor(1),
            .one_minus_beta1 = factor(2),
            .beta2 = factor(3),
            .one_minus_beta2 = factor(4),
            .rate = factor(5),
            .root_scale = factor(6),
            .eps = factor(7)};
  call.Run(a);
}

void Dither(const Tensor& out, const Tensor& x, int64_t step, int64_t moment, int64_t first) {
  const Call call("dither", x);
  call.Require(step >= 1 && first >= 0 && (moment == 0 || moment == 1), "step, moment, first",
               "a step of at least 1, a moment of 0 or 1, a first element of at least 0",
               absl::StrCat(step, ", ", moment, ", ", first));
  const auto sizes = x.sizes();
  const Shape shape(sizes.begin(), sizes.end());
  DitherArgs a;
  a.count = x.numel();
  a.x = call.In<float>("x", x, shape);
  a.out = call.InOut<Bf16>("out", out, shape);
  a.step = static_cast<uint64_t>(step);
  a.moment = static_cast<uint32_t>(moment);
  a.first = static_cast<uint64_t>(first);
  call.Run(a);
}

constexpr Operator kOperators[] = {
    {"square_sums(Tensor x) -> Tensor", TORCH_BOX(&SquareSums), "fp64(x.shape[0])"},
    {"weight_sums(Tensor block, int tensor_columns, int first_row, int first_column) -> Tensor",
     TORCH_BOX(&WeightSums), "int64(3)"},
    {"tree_sum64(Tensor x) -> Tensor", TORCH_BOX(&TreeSum64), "fp64()"},
    {"adamw(Tensor(a!) parameter, Tensor(b!) m, Tensor(c!) v, Tensor gradient,"
     " Tensor(d!)? working, float[] factors) -> ()",
     TORCH_BOX(&AdamW), "None"},
    {"dither(Tensor(a!) out, Tensor x, int step, int moment, int first) -> ()", TORCH_BOX(&Dither),
     "None"},
};

}  // namespace

ISOBIT_OPERATORS(kOperators)

}  // namespace isobit::bridge
