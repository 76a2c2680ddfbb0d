// The CUDA backend: the ops of one tensor-parallel rank on one GPU, with the bits of the CPU
// backend.
#ifndef ISOBIT_KERNELS_CUDA_CUDA_BACKEND_H_
#define ISOBIT_KERNELS_CUDA_CUDA_BACKEND_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/config/numerics_mode.h"
#include "kernels/backend.h"
#include "kernels/cuda/common/device/card.h"
#include "kernels/cuda/common/step_tables/cuda_step_tables.h"
#include "kernels/cuda/common/vanilla/contrast_ops.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_resources.h"

namespace isobit {

struct CudaOptions {
  int device = 0;
  NumericsMode mode = NumericsMode::kTree;
  std::optional<cudaStream_t> stream = {};  // on which the ops run: see CudaDevice::Create
  // Those of another backend, to be shared; `device` and `stream` are then unused. Null: not
  // shared.
  std::shared_ptr<CudaResources> resources = nullptr;
};

// Scratch that an op has used stays allocated, because a captured graph may still use it.
class CudaBackend final : public Backend {
 public:
  // FAILED_PRECONDITION: the device does not exist or is not Hopper. RESOURCE_EXHAUSTED: no memory.
  // INTERNAL: cuBLAS, of mode vanilla, failed.
  static absl::StatusOr<std::unique_ptr<CudaBackend>> Create(const CudaOptions& options);

  const char* name() const override { return name_.c_str(); }
  CudaDevice& device() override { return *resources_->device; }
  CudaStepTables& tables() override { return resources_->tables; }
  const WeightPacker& packer() const override;
  // What a backend of another mode can share with this one (CudaOptions::resources).
  const std::shared_ptr<CudaResources>& resources() const { return resources_; }

 private:
  explicit CudaBackend(std::shared_ptr<CudaResources> resources);

  const std::string name_;
  const std::shared_ptr<CudaResources> resources_;
  std::unique_ptr<cuda::ContrastOps> contrast_;  // null: mode tree
};

// The ops on a caller's stream, for a caller with tensors and memory of its own. They only enqueue
// (LogProbs waits), and keep nothing between ops. See kernels/cuda/common/device/ops.h.
class StreamOps final : public OpTable {
 public:
  StreamOps(cudaStream_t stream, const cuda::Card& card, cuda::Scratch scratch)
      : scratch_(std::move(scratch)),
        card_(card),
        // No op is a dependent launch, as the caller's kernels do not release theirs early.
        stream_{.handle = stream, .dependent = false, .scratch = &scratch_, .card = &card_} {
    Fill(stream_);
  }
  StreamOps(const StreamOps&) = delete;
  StreamOps& operator=(const StreamOps&) = delete;

 private:
  const cuda::Scratch scratch_;
  const cuda::Card card_;
  cuda::Stream stream_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_CUDA_BACKEND_H_
