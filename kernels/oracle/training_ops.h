// The definition of every training op as plain scalar code over kernels/contract: slow and
// single-threaded, the oracle of all tests. Each family of ops has a file of its own.
#ifndef ISOBIT_KERNELS_ORACLE_TRAINING_OPS_H_
#define ISOBIT_KERNELS_ORACLE_TRAINING_OPS_H_

#include <memory>

#include "absl/status/status.h"
#include "kernels/oracle/oracle_ops.h"
#include "kernels/training_ops.h"

namespace isobit {

class OracleTrainingOps final : public TrainingOps {
 public:
  const char* name() const override { return "oracle"; }

  // training_ops.cc
  absl::Status Embedding(const EmbeddingArgs& a) override;
  absl::Status RmsNorm(const RmsNormArgs& a) override;
  absl::Status SwiGlu(const SwiGluArgs& a) override;
  absl::Status SquareSums(const SquareSumsArgs& a) override;
  absl::Status WeightSums(const WeightSumsArgs& a) override;
  absl::Status TreeSum64(const TreeSum64Args& a) override;
  absl::Status AdamW(const AdamWArgs& a) override;
  absl::Status Dither(const DitherArgs& a) override;
  // training_products.cc
  absl::Status StackedLinear(const StackedLinearArgs& a) override;
  absl::Status InputGradient(const InputGradientArgs& a) override;
  absl::Status WeightGradient(const WeightGradientArgs& a) override;
  absl::Status ColumnSums(const ColumnSumsArgs& a) override;
  // training_rows.cc
  absl::Status RmsNormGradient(const RmsNormGradientArgs& a) override;
  absl::Status SwiGluGradient(const SwiGluGradientArgs& a) override;
  absl::Status TrainingQkv(const TrainingQkvArgs& a) override;
  absl::Status QkvGradient(const QkvGradientArgs& a) override;
  absl::Status EmbeddingGradient(const EmbeddingGradientArgs& a) override;
  // training_attention.cc
  absl::Status TrainingAttention(const TrainingAttentionArgs& a) override;
  absl::Status AttentionGradient(const AttentionGradientArgs& a) override;
  // training_log_probs.cc
  absl::Status TrainingLogProbs(const TrainingLogProbsArgs& a) override;
  absl::Status LogProbGradient(const LogProbGradientArgs& a) override;
  // training_losses.cc
  absl::Status PolicyLoss(const PolicyLossArgs& a) override;
  absl::Status LossFunction(const LossFunctionArgs& a) override;
  absl::Status TreeSum(const TreeSumArgs& a) override;
  absl::Status SequenceSums(const SequenceSumsArgs& a) override;

 private:
  OracleOps forward_;
};

std::unique_ptr<TrainingOps> MakeOracleTrainingOps();

}  // namespace isobit

#endif  // ISOBIT_KERNELS_ORACLE_TRAINING_OPS_H_
