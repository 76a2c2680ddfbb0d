#include "trainer_bridge/front/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "trainer_bridge/front/operator.h"

namespace isobit::front {
namespace {

// The parameters that have a gradient.
NamedParameters WithGradients(const NamedParameters& parameters) {
  NamedParameters found;
  for (const auto& parameter : parameters) {
    if (parameter.second.grad().defined()) found.push_back(parameter);
  }
  return found;
}

// values: fp64 on the host, of each parameter's gradient; not finite where the gradient is not.
absl::Status CheckFinite(const NamedParameters& parameters, const torch::Tensor& values) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!std::isfinite(values.data_ptr<double>()[i])) {
      return absl::InvalidArgumentError(
          absl::StrCat("the gradient of ", parameters[i].first, " holds NaN or infinity"));
    }
  }
  return absl::OkStatus();
}

// b^n by n - 1 products.
double Power(double b, int64_t n) {
  double power = b;
  for (int64_t i = 1; i < n; ++i) power *= b;
  return power;
}

std::vector<double> Factors(const AdamWOptions& o, int64_t step) {
  return {1 - o.lr * o.weight_decay,
          o.beta1,
          1 - o.beta1,
          o.beta2,
          1 - o.beta2,
          o.lr / (1 - Power(o.beta1, step)),
          1 / std::sqrt(1 - Power(o.beta2, step)),
          o.eps};
}

}  // namespace

NamedParameters ParametersOf(const torch::nn::Module& module) {
  NamedParameters parameters;
  for (const auto& item : module.named_parameters()) {
    parameters.emplace_back(item.key(), item.value());
  }
  return parameters;
}

absl::StatusOr<double> ClipGradNorm(const NamedParameters& parameters, double max_norm) {
  static const auto squares = Operator<torch::Tensor(const torch::Tensor&)>("square_sums");
  static const auto tree = Operator<torch::Tensor(const torch::Tensor&)>("tree_sum64");
  if (!(max_norm > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("max_norm: expected above 0, got ", max_norm));
  }
  const NamedParameters trained = WithGradients(parameters);
  if (trained.empty()) return 0.0;
  std::vector<torch::Tensor> sums;
  for (const auto& [name, parameter] : trained) {
    const torch::Tensor gradient = parameter.grad().contiguous();
    sums.push_back(tree.call(squares.call(gradient.view({gradient.size(0), -1}))));
  }
  const torch::Tensor host = torch::stack(sums).cpu();
  if (auto status = CheckFinite(trained, host); !status.ok()) return status;
  double total = host.data_ptr<double>()[0];
  for (size_t i = 1; i < trained.size(); ++i) total += host.data_ptr<double>()[i];
  const double norm = std::sqrt(total);
  const double factor = std::min(1.0, max_norm / (norm + 0x1.0c6f7a0b5ed8dp-20));
  if (factor < 1.0) {
    for (const auto& [name, parameter] : trained) parameter.grad().mul_(factor);
  }
  return norm;
}

absl::StatusOr<AdamW> AdamW::Create(NamedParameters parameters, const AdamWOptions& options) {
  for (const double value : {options.lr, options.eps, options.weight_decay}) {
    if (value >= 0.0 && std::isfinite(value)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("lr, eps, weight_decay: expected a finite number of at least 0, got ", value));
  }
  for (const double beta : {options.beta1, options.beta2}) {
    if (beta > 0.0 && beta < 1.0) continue;
    return absl::InvalidArgumentError(absl::StrCat("betas: expected between 0 and 1, got ", beta));
  }
  return AdamW(std::move(parameters), options);
}

AdamW::AdamW(NamedParameters parameters, const AdamWOptions& options)
    : parameters_(std::move(parameters)), options_(options) {
  for (const auto& [name, parameter] : parameters_) {
    const torch::Tensor master = parameter.detach().to(torch::kFloat32, false, true);
    state_.push_back({0, master, torch::zeros_like(master), torch::zeros_like(master)});
  }
}

absl::Status AdamW::Step() {
  static const auto adamw =
      Operator<void(torch::Tensor&, torch::Tensor&, torch::Tensor&, const torch::Tensor&,
                    const std::optional<torch::Tensor>&, c10::ArrayRef<double>)>("adamw");
  const torch::NoGradGuard no_grad;
  const NamedParameters trained = WithGradients(parameters_);
  if (trained.empty()) return absl::OkStatus();
  std::vector<torch::Tensor> gradients;
  for (const auto& [name, parameter] : trained) gradients.push_back(parameter.grad());
  // The greatest magnitudes: one pass over all gradients, and one wait for the device.
  const auto greatest = at::_foreach_norm(gradients, std::numeric_limits<double>::infinity());
  const torch::Tensor host = torch::stack(greatest).to(torch::kCPU, torch::kFloat64);
  if (auto status = CheckFinite(trained, host); !status.ok()) return status;

  for (size_t i = 0; i < parameters_.size(); ++i) {
    torch::Tensor& parameter = parameters_[i].second;
    if (!parameter.grad().defined()) continue;
    State& s = state_[i];
    adamw.call(s.master, s.m, s.v, parameter.grad().contiguous(), parameter.detach(),
               Factors(options_, ++s.steps));
    parameter.mutable_grad().reset();
  }
  return absl::OkStatus();
}

}  // namespace isobit::front
