// Where an op runs: the training kernels of the device that its tensors lie on.
#ifndef ISOBIT_TRAINER_BRIDGE_TORCH_BACKEND_H_
#define ISOBIT_TRAINER_BRIDGE_TORCH_BACKEND_H_

#include <torch/csrc/stable/tensor.h>

#include <functional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/training_ops.h"

namespace isobit::bridge {

class Backend {
 public:
  // Throws std::runtime_error if there are no kernels for the device of `tensor`, which must
  // outlive this. op: for the error.
  Backend(const char* op, const torch::stable::Tensor& tensor);

  template <typename Args>
  absl::Status Run(absl::Status (TrainingOps::*op)(const Args&), const Args& args) const {
    return With([&](TrainingOps& ops) { return (ops.*op)(args); });
  }

 private:
  absl::Status With(absl::FunctionRef<absl::Status(TrainingOps&)> run) const;

  const torch::stable::Tensor& tensor_;
};

}  // namespace isobit::bridge

#endif  // ISOBIT_TRAINER_BRIDGE_TORCH_BACKEND_H_
