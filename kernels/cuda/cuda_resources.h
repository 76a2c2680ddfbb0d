// What a rank's ops need on its GPU in addition to their arguments.
#ifndef ISOBIT_KERNELS_CUDA_CUDA_RESOURCES_H_
#define ISOBIT_KERNELS_CUDA_CUDA_RESOURCES_H_

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/step_tables/cuda_step_tables.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/sm90/log_probs/transfer.h"
#include "kernels/device.h"
#include "kernels/ops/log_probs.h"

namespace isobit {

// Backends of several modes may share it if only one thread at a time uses any of them: their ops
// then run on one stream, in the order of their calls.
class CudaResources {
 public:
  explicit CudaResources(std::unique_ptr<CudaDevice> gpu) : device(std::move(gpu)) {}
  CudaResources(const CudaResources&) = delete;
  CudaResources& operator=(const CudaResources&) = delete;

  // At least `bytes` bytes, until the next call. RESOURCE_EXHAUSTED: there is no memory.
  absl::StatusOr<std::byte*> Scratch(size_t bytes);
  // The device's stream, with this scratch.
  cuda::Stream stream() const {
    cuda::Stream stream = device->stream();
    stream.scratch = &scratch_of_stream_;
    return stream;
  }

  const std::unique_ptr<CudaDevice> device;
  CudaStepTables tables{device->ordinal(), device->stream().handle};
  cuda::LogProbTransfer log_probs;

 private:
  const cuda::Scratch scratch_of_stream_ = [this](size_t bytes) { return Scratch(bytes); };
  Memory scratch_;  // of the current op
  size_t scratch_bytes_ = 0;
  std::vector<Memory> outgrown_;  // earlier scratch, which a captured graph may still use
};

template <typename Args>
absl::Status Run(const Args& args, CudaResources& resources) {
  ISOBIT_RETURN_IF_ERROR(resources.device->Enter());
  return cuda::Run(args, resources.stream());
}
inline absl::Status Run(const LogProbsArgs& args, CudaResources& resources) {
  ISOBIT_RETURN_IF_ERROR(resources.device->Enter());
  return resources.log_probs.Run(args, resources.device->stream());
}

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_CUDA_RESOURCES_H_
