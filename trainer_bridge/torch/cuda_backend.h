// GPU kernels. A build without -DISOBIT_CUDA=ON has none: cuda_backend_absent.cc.
#ifndef ISOBIT_TRAINER_BRIDGE_TORCH_CUDA_BACKEND_H_
#define ISOBIT_TRAINER_BRIDGE_TORCH_CUDA_BACKEND_H_

#include <torch/csrc/stable/tensor.h>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/ops/op_table.h"

namespace isobit::bridge {

// Calls `run` with the ops of the GPU of `tensor`, on PyTorch's current stream of that GPU, with
// scratch memory from PyTorch's allocator. Waits for nothing. UNIMPLEMENTED: a build without CUDA.
absl::Status WithCuda(const torch::stable::Tensor& tensor,
                      absl::FunctionRef<absl::Status(const OpTable&)> run);

}  // namespace isobit::bridge

#endif  // ISOBIT_TRAINER_BRIDGE_TORCH_CUDA_BACKEND_H_
