// See tree_cuda_ops.h.
#include "kernels/cuda/tree_cuda_ops.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/rows/rows.h"
#include "kernels/cuda/rows/step_kernels.h"

namespace isobit {

TreeCudaOps::TreeCudaOps(std::shared_ptr<CudaResources> resources)
    : name_(absl::StrCat("cuda/", resources->device->name())), resources_(std::move(resources)) {}

absl::Status TreeCudaOps::Linear(const LinearArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  return cuda::LaunchLinear(args, device().stream());
}

absl::Status TreeCudaOps::Embedding(const EmbeddingArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  return cuda::LaunchEmbedding(args, device().stream());
}

absl::Status TreeCudaOps::RmsNorm(const RmsNormArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  return cuda::LaunchRmsNorm(args, device().stream());
}

absl::Status TreeCudaOps::SwiGlu(const SwiGluArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  return cuda::LaunchSwiGlu(args, device().stream());
}

absl::Status TreeCudaOps::Qkv(const QkvArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  return cuda::LaunchQkv(args, device().stream());
}

absl::Status TreeCudaOps::Attention(const AttentionArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  ISOBIT_RETURN_IF_ERROR(resources_->ReserveScratch(cuda::AttentionWorkspaceBytes(args)));
  return cuda::LaunchAttention(args, {resources_->scratch.get(), resources_->scratch_bytes},
                               device().stream());
}

absl::Status TreeCudaOps::CopyPages(const CopyPagesArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  return cuda::LaunchCopyPages(args, device().stream());
}

absl::Status TreeCudaOps::Reduce(const ReduceArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  return cuda::LaunchReduce(args, device().stream());
}

absl::Status TreeCudaOps::LogProbs(const LogProbArgs& args) {
  ISOBIT_RETURN_IF_ERROR(device().Enter());
  return resources_->log_probs.Run(args, device().stream());
}

}  // namespace isobit
