// Where an op runs: the training kernels of the device that its tensors lie on.
#ifndef ISOBIT_TRAINER_BRIDGE_TORCH_BACKEND_H_
#define ISOBIT_TRAINER_BRIDGE_TORCH_BACKEND_H_

#include <torch/csrc/stable/tensor.h>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/training_ops.h"

namespace isobit::bridge {

// Hands `run` the ops of the device that `tensor` lies on. UNIMPLEMENTED: there are none for it.
absl::Status WithBackend(const torch::stable::Tensor& tensor,
                         absl::FunctionRef<absl::Status(TrainingOps&)> run);

}  // namespace isobit::bridge

#endif  // ISOBIT_TRAINER_BRIDGE_TORCH_BACKEND_H_
