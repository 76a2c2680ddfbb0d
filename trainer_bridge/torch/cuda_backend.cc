#include "trainer_bridge/torch/cuda_backend.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/sm90/device/card.h"

namespace isobit::bridge {

absl::Status WithCuda(const torch::stable::Tensor& tensor,
                      absl::FunctionRef<absl::Status(const OpTable&)> run) {
  const int32_t device = tensor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const absl::StatusOr<cuda::Card> card = cuda::GetCard(device);
  if (!card.ok()) return card.status();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  // Freed on return, when kernels may still read it: the allocator gives it only to work that
  // comes later on this stream.
  std::vector<torch::stable::Tensor> scratch;
  StreamOps ops(static_cast<cudaStream_t>(stream), *card,
                [&](size_t bytes) -> absl::StatusOr<std::byte*> {
                  const std::vector<int64_t> shape = {static_cast<int64_t>(bytes)};
                  scratch.push_back(
                      torch::stable::new_empty(tensor, shape, torch::headeronly::ScalarType::Byte));
                  return static_cast<std::byte*>(scratch.back().mutable_data_ptr());
                });
  return run(ops);
}

}  // namespace isobit::bridge
