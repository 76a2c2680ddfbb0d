// A decoder as a trainable LibTorch module: parameters under Hugging Face's names, a forward pass
// with the bits of rollout and scorer, gradients as the contract defines them (C10 to C14).
//
// Loads and saves the model directories that the services load. The Python version is
// python/isobit/torch/patch.py.
#ifndef ISOBIT_TRAINER_BRIDGE_FRONT_DECODER_H_
#define ISOBIT_TRAINER_BRIDGE_FRONT_DECODER_H_

#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/tensor_plan.h"
#include "kernels/blocks/attention.h"
#include "kernels/blocks/gated_mlp.h"
#include "kernels/model/model_plan.h"
#include "trainer_bridge/front/batch.h"
#include "trainer_bridge/front/ops.h"

namespace isobit::front {

// The scores of a batch's targets, fp32 [scored rows]. Both are differentiable.
struct Scores {
  torch::Tensor logprobs;
  torch::Tensor entropies;
};

class Decoder : public torch::nn::Module {
 public:
  // Loads config.json and the weights of `directory`. INVALID_ARGUMENT, NOT_FOUND: as for
  // Checkpoint and ParseModelConfig. INVALID_ARGUMENT also if a weight is not finite in bf16, or if
  // an lm_head differs from the embedding to which config.json ties it.
  static absl::StatusOr<std::shared_ptr<Decoder>> Load(const std::string& directory);

  const ModelConfig& config() const { return plan_.config; }

  // Scores the targets. The batch's tensors lie on the parameters' device. INVALID_ARGUMENT: a
  // sequence is too long, or a token is not in the vocabulary.
  absl::StatusOr<Scores> Score(const TrainingBatch& batch);

  // Writes the bf16 parameters as model.safetensors, and a config.json: a directory that Load and
  // the services can load.
  absl::Status Save(const std::string& directory) const;

 private:
  explicit Decoder(const ModelConfig& config);

  // The tensors of a parameter of a block, by its number in plan_.parameters; none for
  // kNoParameter.
  std::vector<torch::Tensor> Weights(size_t block, ParameterIndex index) const;
  torch::Tensor Weight(size_t block, ParameterIndex index) const;
  std::optional<torch::Tensor> MaybeWeight(size_t block, ParameterIndex index) const;

  // What a block makes of the residual stream `hidden`. One for each kind of block.
  torch::Tensor Forward(const isobit::Attention& block, size_t number, const torch::Tensor& hidden,
                        const TrainingBatch& batch) const;
  torch::Tensor Forward(const GatedMlp& block, size_t number, const torch::Tensor& hidden,
                        const TrainingBatch& batch) const;
  // Extends the rotary table to `positions`.
  void GrowTable(int64_t positions);

  ModelPlan plan_;
  std::map<std::string, torch::Tensor> parameters_;  // by Hugging Face's names
  torch::Tensor cosine_;                             // fp32 [positions, head_dim / 2]
  torch::Tensor sine_;
};

}  // namespace isobit::front

#endif  // ISOBIT_TRAINER_BRIDGE_FRONT_DECODER_H_
