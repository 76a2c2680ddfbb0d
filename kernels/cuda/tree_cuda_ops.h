// The ops of the CUDA backend, in the contract's order.
#ifndef ISOBIT_KERNELS_CUDA_TREE_CUDA_OPS_H_
#define ISOBIT_KERNELS_CUDA_TREE_CUDA_OPS_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/linear/packer.h"
#include "kernels/cuda/log_prob_transfer.h"

namespace isobit {

class TreeCudaOps : public CudaOps {
 public:
  explicit TreeCudaOps(std::unique_ptr<CudaDevice> device);

  const char* name() const override { return name_.c_str(); }
  CudaDevice& device() override { return *device_; }
  CudaStepTables& tables() override { return tables_; }
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

 protected:
  struct Scratch {
    Memory memory;
    size_t bytes = 0;
  };
  absl::Status Reserve(Scratch& scratch, size_t bytes);

 private:
  const std::string name_;
  const std::unique_ptr<CudaDevice> device_;
  CudaStepTables tables_;
  cuda::LogProbTransfer log_probs_;
  Scratch attention_;
  std::vector<Memory> outgrown_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_TREE_CUDA_OPS_H_
