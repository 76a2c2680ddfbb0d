// Where an op runs: on the device of its tensors, with that device's training kernels.
#ifndef ISOBIT_TRAINER_BRIDGE_TORCH_BACKEND_H_
#define ISOBIT_TRAINER_BRIDGE_TORCH_BACKEND_H_

#include <torch/csrc/stable/tensor.h>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/ops/op_table.h"

namespace isobit::bridge {

// Calls `run` with the ops of the device of `tensor`. UNIMPLEMENTED: that device has none.
absl::Status WithBackend(const torch::stable::Tensor& tensor,
                         absl::FunctionRef<absl::Status(const OpTable&)> run);

}  // namespace isobit::bridge

#endif  // ISOBIT_TRAINER_BRIDGE_TORCH_BACKEND_H_
