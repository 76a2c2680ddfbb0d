// The ops of the CUDA backend, in the contract's order.
#ifndef ISOBIT_KERNELS_CUDA_TREE_CUDA_OPS_H_
#define ISOBIT_KERNELS_CUDA_TREE_CUDA_OPS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cuda_resources.h"
#include "kernels/cuda/linear/packer.h"

namespace isobit {

class TreeCudaOps : public CudaOps {
 public:
  explicit TreeCudaOps(std::shared_ptr<CudaResources> resources);

  const char* name() const override { return name_.c_str(); }
  CudaDevice& device() override { return *resources_->device; }
  CudaStepTables& tables() override { return resources_->tables; }
  const std::shared_ptr<CudaResources>& resources() const override { return resources_; }
  const WeightPacker& packer() const override { return cuda::LinearPacker(); }

  absl::Status Linear(const LinearArgs& args) override;
  absl::Status Embedding(const EmbeddingArgs& args) override;
  absl::Status RmsNorm(const RmsNormArgs& args) override;
  absl::Status SwiGlu(const SwiGluArgs& args) override;
  absl::Status Qkv(const QkvArgs& args) override;
  absl::Status Attention(const AttentionArgs& args) override;
  absl::Status CopyPages(const CopyPagesArgs& args) override;
  absl::Status Reduce(const ReduceArgs& args) override;
  absl::Status LogProbs(const LogProbArgs& args) override;

 private:
  const std::string name_;
  const std::shared_ptr<CudaResources> resources_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_TREE_CUDA_OPS_H_
