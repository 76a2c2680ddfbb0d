// The ops of training on a GPU (kernels/training_ops.h), with the oracle's bits.
#ifndef ISOBIT_KERNELS_CUDA_TRAINING_CUDA_OPS_H_
#define ISOBIT_KERNELS_CUDA_TRAINING_CUDA_OPS_H_

#include <cstddef>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/training_ops.h"

namespace isobit {

// Enqueues its ops on the caller's stream, in order with the caller's work; never waits, and keeps
// nothing between ops. Pointers are to memory of the stream's device, which the caller has made
// current. Must not be used by two threads at the same time.
class TrainingCudaOps final : public TrainingOps {
 public:
  // Allocates scratch for one op: so many bytes of the device's memory, at a multiple of 256, valid
  // until the work on the stream at the op's return is done.
  using Scratch = std::function<absl::StatusOr<std::byte*>(size_t bytes)>;

  TrainingCudaOps(cudaStream_t stream, Scratch scratch)
      // No op is a dependent launch, as the caller's kernels do not release theirs early.
      : stream_{.handle = stream, .dependent = false}, scratch_(std::move(scratch)) {}

  const char* name() const override { return "cuda"; }

  absl::Status Embedding(const EmbeddingArgs& args) override;
  absl::Status RmsNorm(const RmsNormArgs& args) override;
  absl::Status SwiGlu(const SwiGluArgs& args) override;
  absl::Status StackedLinear(const StackedLinearArgs& args) override;
  absl::Status InputGradient(const InputGradientArgs& args) override;
  absl::Status WeightGradient(const WeightGradientArgs& args) override;
  absl::Status ColumnSums(const ColumnSumsArgs& args) override;
  absl::Status RmsNormGradient(const RmsNormGradientArgs& args) override;
  absl::Status SwiGluGradient(const SwiGluGradientArgs& args) override;
  absl::Status TrainingQkv(const TrainingQkvArgs& args) override;
  absl::Status QkvGradient(const QkvGradientArgs& args) override;
  absl::Status EmbeddingGradient(const EmbeddingGradientArgs& args) override;
  absl::Status TrainingAttention(const TrainingAttentionArgs& args) override;
  absl::Status AttentionGradient(const AttentionGradientArgs& args) override;
  absl::Status TrainingLogProbs(const TrainingLogProbsArgs& args) override;
  absl::Status LogProbGradient(const LogProbGradientArgs& args) override;
  absl::Status PolicyLoss(const PolicyLossArgs& args) override;
  absl::Status LossFunction(const LossFunctionArgs& args) override;
  absl::Status TreeSum(const TreeSumArgs& args) override;
  absl::Status SequenceSums(const SequenceSumsArgs& args) override;
  absl::Status WeightSums(const WeightSumsArgs& args) override;
  absl::Status SquareSums(const SquareSumsArgs& args) override;
  absl::Status TreeSum64(const TreeSum64Args& args) override;
  absl::Status AdamW(const AdamWArgs& args) override;
  absl::Status Dither(const DitherArgs& args) override;

 private:
  // Returns null for 0 bytes.
  absl::StatusOr<std::byte*> ScratchOf(size_t bytes);
  // Launches an op that needs scratch.
  template <typename Args>
  absl::Status LaunchWithScratch(absl::Status (*launch)(const Args&, std::byte*,
                                                        const cuda::Stream&),
                                 const Args& args, size_t bytes) {
    const absl::StatusOr<std::byte*> scratch = ScratchOf(bytes);
    return scratch.ok() ? launch(args, *scratch, stream_) : scratch.status();
  }

  const cuda::Stream stream_;
  const Scratch scratch_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_TRAINING_CUDA_OPS_H_
