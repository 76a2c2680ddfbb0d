#include "trainer_bridge/torch/cuda_backend.h"

namespace isobit::bridge {

absl::Status WithCuda(const torch::stable::Tensor& /*tensor*/,
                      absl::FunctionRef<absl::Status(const OpTable&)> /*run*/) {
  return absl::UnimplementedError(
      "expected tensors on cpu, got tensors on cuda: the library was built without "
      "-DISOBIT_CUDA=ON");
}

}  // namespace isobit::bridge
