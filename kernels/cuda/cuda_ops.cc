// Joins the ops of this folder into one backend.
#include "kernels/cuda/cuda_ops.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/linear/layout.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/log_prob_stage.h"
#include "kernels/cuda/rows/rows.h"
#include "kernels/cuda/vanilla/cublas_linear.h"
#include "kernels/plain_weight_packer.h"

namespace isobit {
namespace {

class Packer final : public WeightPacker {
 public:
  size_t PackedBytes(const LinearShape& shape) const override {
    return cuda::PackedLinearBytes(shape);
  }
  void Pack(const LinearShape& shape, const Bf16* w, int64_t ldw,
            std::byte* packed) const override {
    cuda::PackLinear(shape, w, ldw, packed);
  }
};

class StreamOps final : public CudaOps {
 public:
  static absl::StatusOr<std::unique_ptr<CudaOps>> Create(const CudaOptions& options) {
    ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device,
                            CudaDevice::Create(options.device, options.stream));
    std::unique_ptr<StreamOps> ops(new StreamOps(options.mode, std::move(device)));
    if (options.mode == NumericsMode::kVanilla) {
      ISOBIT_ASSIGN_OR_RETURN(ops->cublas_, cuda::CublasLinear::Create(options.device));
    }
    return ops;
  }

  const char* name() const override { return name_.c_str(); }
  CudaDevice& device() override { return *device_; }
  CudaStepTables& tables() override { return tables_; }
  const WeightPacker& packer() const override { return CudaWeightPacker(mode_); }

  absl::Status Linear(const LinearArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(device_->Enter());
    if (cublas_ == nullptr) return cuda::LaunchLinear(args, device_->stream());
    if (args.swiglu_out != nullptr) {
      const size_t elements = static_cast<size_t>(args.m * args.weight.shape.n);
      ISOBIT_RETURN_IF_ERROR(Reserve(gate_up_, elements * sizeof(Bf16)));
    }
    return cublas_->Run(args, reinterpret_cast<Bf16*>(gate_up_.memory.get()), device_->stream());
  }

  absl::Status Embedding(const EmbeddingArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(device_->Enter());
    return cuda::LaunchEmbedding(args, device_->stream());
  }

  absl::Status RmsNorm(const RmsNormArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(device_->Enter());
    return cuda::LaunchRmsNorm(args, device_->stream());
  }

  absl::Status SwiGlu(const SwiGluArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(device_->Enter());
    return cuda::LaunchSwiGlu(args, device_->stream());
  }

  absl::Status Qkv(const QkvArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(device_->Enter());
    return cuda::LaunchQkv(args, device_->stream());
  }

  absl::Status Attention(const AttentionArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(device_->Enter());
    const size_t bytes = cuda::AttentionWorkspaceBytes(args);
    ISOBIT_RETURN_IF_ERROR(Reserve(attention_, bytes));
    return cuda::LaunchAttention(args, {attention_.memory.get(), attention_.bytes},
                                 device_->stream());
  }

  absl::Status Reduce(const ReduceArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(device_->Enter());
    return cuda::LaunchReduce(args, device_->stream());
  }

  absl::Status LogProbs(const LogProbArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(device_->Enter());
    return log_probs_.Run(args, device_->stream());
  }

 private:
  struct Scratch {
    Memory memory;
    size_t bytes = 0;
  };

  StreamOps(NumericsMode mode, std::unique_ptr<CudaDevice> device)
      : mode_(mode),
        name_(absl::StrCat("cuda/", device->name())),
        device_(std::move(device)),
        tables_(*device_) {}

  absl::Status Reserve(Scratch& scratch, size_t bytes) {
    if (bytes <= scratch.bytes) return absl::OkStatus();
    if (scratch.memory != nullptr) outgrown_.push_back(std::move(scratch.memory));
    scratch.bytes = std::max(bytes, 2 * scratch.bytes);  // so that the outgrown are less than it
    absl::StatusOr<Memory> memory = device_->Allocate(scratch.bytes);
    if (!memory.ok()) scratch.bytes = 0;
    ISOBIT_ASSIGN_OR_RETURN(scratch.memory, std::move(memory));
    return absl::OkStatus();
  }

  const NumericsMode mode_;
  const std::string name_;
  const std::unique_ptr<CudaDevice> device_;
  CudaStepTables tables_;
  cuda::LogProbStage log_probs_;
  std::unique_ptr<cuda::CublasLinear> cublas_;  // mode vanilla alone
  Scratch attention_;
  Scratch gate_up_;  // of cuBLAS, before SwiGLU
  std::vector<Memory> outgrown_;
};

}  // namespace

const WeightPacker& CudaWeightPacker(NumericsMode mode) {
  static const Packer packer;
  static const PlainWeightPacker for_cublas;
  if (mode == NumericsMode::kVanilla) return for_cublas;
  return packer;
}

absl::StatusOr<std::unique_ptr<CudaOps>> MakeCudaOps(const CudaOptions& options) {
  return StreamOps::Create(options);
}

}  // namespace isobit
