// See tree_cuda_ops.h.
#include "kernels/cuda/tree_cuda_ops.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/rows/rows.h"
#include "kernels/cuda/rows/step_kernels.h"

namespace isobit {

TreeCudaOps::TreeCudaOps(std::unique_ptr<CudaDevice> device)
    : name_(absl::StrCat("cuda/", device->name())), device_(std::move(device)), tables_(*device_) {}

absl::Status TreeCudaOps::Linear(const LinearArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device_->Enter());
  return cuda::LaunchLinear(args, device_->stream());
}

absl::Status TreeCudaOps::Embedding(const EmbeddingArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device_->Enter());
  return cuda::LaunchEmbedding(args, device_->stream());
}

absl::Status TreeCudaOps::RmsNorm(const RmsNormArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device_->Enter());
  return cuda::LaunchRmsNorm(args, device_->stream());
}

absl::Status TreeCudaOps::SwiGlu(const SwiGluArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device_->Enter());
  return cuda::LaunchSwiGlu(args, device_->stream());
}

absl::Status TreeCudaOps::Qkv(const QkvArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device_->Enter());
  return cuda::LaunchQkv(args, device_->stream());
}

absl::Status TreeCudaOps::Attention(const AttentionArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device_->Enter());
  const size_t bytes = cuda::AttentionWorkspaceBytes(args);
  ISOBIT_RETURN_IF_ERROR(Reserve(attention_, bytes));
  return cuda::LaunchAttention(args, {attention_.memory.get(), attention_.bytes},
                               device_->stream());
}

absl::Status TreeCudaOps::CopyPages(const CopyPagesArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device_->Enter());
  return cuda::LaunchCopyPages(args, device_->stream());
}

absl::Status TreeCudaOps::Reduce(const ReduceArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device_->Enter());
  return cuda::LaunchReduce(args, device_->stream());
}

absl::Status TreeCudaOps::LogProbs(const LogProbArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device_->Enter());
  return log_probs_.Run(args, device_->stream());
}

absl::Status TreeCudaOps::Reserve(Scratch& scratch, size_t bytes) {
  if (bytes <= scratch.bytes) return absl::OkStatus();
  if (scratch.memory != nullptr) outgrown_.push_back(std::move(scratch.memory));
  // Doubling keeps the sum of all outgrown scratch below the size in use.
  scratch.bytes = std::max(bytes, 2 * scratch.bytes);
  absl::StatusOr<Memory> memory = device_->Allocate(scratch.bytes);
  if (!memory.ok()) scratch.bytes = 0;
  ISOBIT_ASSIGN_OR_RETURN(scratch.memory, std::move(memory));
  return absl::OkStatus();
}

}  // namespace isobit
