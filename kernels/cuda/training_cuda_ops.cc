// See training_cuda_ops.h.
#include "kernels/cuda/training_cuda_ops.h"

#include "common/base/status_macros.h"
#include "kernels/cuda/attention/training.h"
#include "kernels/cuda/linear/input_gradient.h"
#include "kernels/cuda/linear/stacked_linear.h"
#include "kernels/cuda/linear/weight_gradient.h"
#include "kernels/cuda/log_probs/training.h"
#include "kernels/cuda/rows/gradients.h"
#include "kernels/cuda/rows/optimizer.h"
#include "kernels/cuda/rows/rows.h"
#include "kernels/cuda/weights/weight_kernels.h"

namespace isobit {

absl::StatusOr<std::byte*> TrainingCudaOps::ScratchOf(size_t bytes) {
  if (bytes == 0) return nullptr;
  return scratch_(bytes);
}

absl::Status TrainingCudaOps::Embedding(const EmbeddingArgs& args) {
  return cuda::LaunchEmbedding(args, stream_);
}

absl::Status TrainingCudaOps::RmsNorm(const RmsNormArgs& args) {
  return cuda::LaunchRmsNorm(args, stream_);
}

absl::Status TrainingCudaOps::SwiGlu(const SwiGluArgs& args) {
  return cuda::LaunchSwiGlu(args, stream_);
}

absl::Status TrainingCudaOps::StackedLinear(const StackedLinearArgs& args) {
  return cuda::LaunchStackedLinear(args, stream_);
}

absl::Status TrainingCudaOps::InputGradient(const InputGradientArgs& args) {
  return cuda::LaunchInputGradient(args, stream_);
}

absl::Status TrainingCudaOps::WeightGradient(const WeightGradientArgs& args) {
  return LaunchWithScratch(cuda::LaunchWeightGradient, args,
                           cuda::WeightGradientWorkspaceBytes(args));
}

absl::Status TrainingCudaOps::ColumnSums(const ColumnSumsArgs& args) {
  return LaunchWithScratch(cuda::LaunchColumnSums, args, cuda::ColumnSumsWorkspaceBytes(args));
}

absl::Status TrainingCudaOps::RmsNormGradient(const RmsNormGradientArgs& args) {
  return LaunchWithScratch(cuda::LaunchRmsNormGradient, args,
                           cuda::RmsNormGradientWorkspaceBytes(args));
}

absl::Status TrainingCudaOps::SwiGluGradient(const SwiGluGradientArgs& args) {
  return cuda::LaunchSwiGluGradient(args, stream_);
}

absl::Status TrainingCudaOps::TrainingQkv(const TrainingQkvArgs& args) {
  return cuda::LaunchTrainingQkv(args, stream_);
}

absl::Status TrainingCudaOps::QkvGradient(const QkvGradientArgs& args) {
  return LaunchWithScratch(cuda::LaunchQkvGradient, args, cuda::QkvGradientWorkspaceBytes(args));
}

absl::Status TrainingCudaOps::EmbeddingGradient(const EmbeddingGradientArgs& args) {
  return cuda::LaunchEmbeddingGradient(args, stream_);
}

absl::Status TrainingCudaOps::TrainingAttention(const TrainingAttentionArgs& args) {
  return cuda::LaunchTrainingAttention(args, stream_);
}

absl::Status TrainingCudaOps::AttentionGradient(const AttentionGradientArgs& args) {
  const size_t bytes = cuda::AttentionGradientWorkspaceBytes(args);
  ISOBIT_ASSIGN_OR_RETURN(std::byte* const scratch, ScratchOf(bytes));
  return cuda::LaunchAttentionGradient(args, {scratch, bytes}, stream_);
}

absl::Status TrainingCudaOps::TrainingLogProbs(const TrainingLogProbsArgs& args) {
  return LaunchWithScratch(cuda::LaunchTrainingLogProbs, args,
                           cuda::TrainingLogProbsWorkspaceBytes(args));
}

absl::Status TrainingCudaOps::LogProbGradient(const LogProbGradientArgs& args) {
  return cuda::LaunchLogProbGradient(args, stream_);
}

absl::Status TrainingCudaOps::PolicyLoss(const PolicyLossArgs& args) {
  return cuda::LaunchPolicyLoss(args, stream_);
}

absl::Status TrainingCudaOps::LossFunction(const LossFunctionArgs& args) {
  return cuda::LaunchLossFunction(args, stream_);
}

absl::Status TrainingCudaOps::TreeSum(const TreeSumArgs& args) {
  return LaunchWithScratch(cuda::LaunchTreeSum, args, cuda::TreeSumWorkspaceBytes(args));
}

absl::Status TrainingCudaOps::SequenceSums(const SequenceSumsArgs& args) {
  return cuda::LaunchSequenceSums(args, stream_);
}

absl::Status TrainingCudaOps::WeightSums(const WeightSumsArgs& args) {
  return cuda::AddWeightSums(args.from, args.part, args.sums, stream_);
}

absl::Status TrainingCudaOps::SquareSums(const SquareSumsArgs& args) {
  return cuda::LaunchSquareSums(args, stream_);
}

absl::Status TrainingCudaOps::TreeSum64(const TreeSum64Args& args) {
  return LaunchWithScratch(cuda::LaunchTreeSum64, args, cuda::TreeSum64WorkspaceBytes(args));
}

absl::Status TrainingCudaOps::AdamW(const AdamWArgs& args) {
  return cuda::LaunchAdamW(args, stream_);
}

absl::Status TrainingCudaOps::Dither(const DitherArgs& args) {
  return cuda::LaunchDither(args, stream_);
}

}  // namespace isobit
