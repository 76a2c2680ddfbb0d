// Shared by the differentiable functions: finds isobit's operators in PyTorch's dispatcher.
#ifndef ISOBIT_TRAINER_BRIDGE_FRONT_OPERATOR_H_
#define ISOBIT_TRAINER_BRIDGE_FRONT_OPERATOR_H_

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/types.h>

#include <optional>
#include <string>

namespace isobit::front {

// Converts a tensor that may be undefined to an operator's argument.
inline std::optional<torch::Tensor> Maybe(const torch::Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

// The operator isobit::name. c10::Error: it does not exist, or has another signature.
template <typename Signature>
c10::TypedOperatorHandle<Signature> Operator(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string("isobit::") + name).c_str(), "")
      .typed<Signature>();
}

}  // namespace isobit::front

#endif  // ISOBIT_TRAINER_BRIDGE_FRONT_OPERATOR_H_
