// The linear layers with autograd.
#include "trainer_bridge/front/operator.h"
#include "trainer_bridge/front/ops.h"

namespace isobit::front {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// The gradients of stacked weights and their biases, in the order of the inputs.
void PushWeightGradients(const Tensor& dy, const Tensor& x, const Bounds& rows, bool has_bias,
                         const Bounds& packs, variable_list* gradients) {
  static const auto weights = Operator<std::vector<Tensor>(
      const Tensor&, const Tensor&, c10::IntArrayRef, c10::IntArrayRef)>("linear_backward_weights");
  static const auto sums = Operator<Tensor(const Tensor&, c10::IntArrayRef)>("column_sums");
  for (Tensor& dweight : weights.call(dy, x, rows, packs)) gradients->push_back(std::move(dweight));
  if (!has_bias) return;
  for (Tensor& dbias : sums.call(dy, packs).split_with_sizes(rows)) {
    gradients->push_back(dbias.clone());
  }
}

Tensor InputGradientOf(const Tensor& dy, const std::vector<Tensor>& weights) {
  static const auto op = Operator<Tensor(const Tensor&, at::TensorList)>("linear_backward_input");
  return op.call(dy, weights);
}

struct LinearNode : Function<LinearNode> {
  // inputs: weights, then one bias each or none.
  static Tensor forward(AutogradContext* ctx, const Tensor& x, at::TensorList inputs,
                        int64_t num_weights, const Bounds& packs) {
    static const auto op =
        Operator<Tensor(const Tensor&, at::TensorList, at::TensorList, c10::IntArrayRef)>("linear");
    const auto parts = static_cast<size_t>(num_weights);
    variable_list saved = {x};
    saved.insert(saved.end(), inputs.begin(), inputs.begin() + num_weights);
    ctx->save_for_backward(saved);
    ctx->saved_data["packs"] = packs;
    ctx->saved_data["has_bias"] = inputs.size() > parts;
    return op.call(x, inputs.slice(0, parts), inputs.slice(parts), packs);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    variable_list saved = ctx->get_saved_variables();
    const Tensor x = saved[0];
    saved.erase(saved.begin());
    Bounds rows;
    for (const Tensor& w : saved) rows.push_back(w.size(0));
    const Tensor d = dy[0].contiguous();
    variable_list gradients = {InputGradientOf(d, saved)};
    PushWeightGradients(d, x, rows, ctx->saved_data["has_bias"].toBool(),
                        ctx->saved_data["packs"].toIntVector(), &gradients);
    gradients.emplace_back();
    gradients.emplace_back();
    return gradients;
  }
};

struct LinearAddNode : Function<LinearAddNode> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const MaybeTensor& bias, const Tensor& residual, int64_t unit,
                        const Bounds& packs) {
    static const auto op = Operator<Tensor(const Tensor&, const Tensor&, const MaybeTensor&,
                                           const Tensor&, int64_t, c10::IntArrayRef)>("linear_add");
    ctx->save_for_backward({x, weight});
    ctx->saved_data["packs"] = packs;
    ctx->saved_data["has_bias"] = bias.has_value();
    return op.call(x, weight, bias, residual, unit, packs);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor d = dy[0].contiguous();
    variable_list gradients = {InputGradientOf(d, {saved[1]})};
    PushWeightGradients(d, saved[0], {saved[1].size(0)}, ctx->saved_data["has_bias"].toBool(),
                        ctx->saved_data["packs"].toIntVector(), &gradients);
    if (gradients.size() == 2) gradients.emplace_back();
    gradients.push_back(dy[0]);
    gradients.emplace_back();
    gradients.emplace_back();
    return gradients;
  }
};

}  // namespace

Tensor Linear(const Tensor& x, const std::vector<Tensor>& weights,
              const std::vector<Tensor>& biases, const Bounds& packs) {
  std::vector<Tensor> inputs = weights;
  inputs.insert(inputs.end(), biases.begin(), biases.end());
  return LinearNode::apply(x, at::TensorList(inputs), static_cast<int64_t>(weights.size()), packs);
}

Tensor LinearAdd(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                 const Tensor& residual, int64_t unit, const Bounds& packs) {
  return LinearAddNode::apply(x, weight, bias, residual, unit, packs);
}

}  // namespace isobit::front
