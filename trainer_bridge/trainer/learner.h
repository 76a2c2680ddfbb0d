// The trained model and its optimizer. Their arithmetic is the contract's (docs/training.md).
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_LEARNER_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_LEARNER_H_

#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/safetensors.h"
#include "trainer_bridge/front/decoder.h"
#include "trainer_bridge/front/optimizer.h"
#include "trainer_bridge/trainer/completion.h"
#include "trainer_bridge/trainer/logprob_gap.h"
#include "trainer_bridge/trainer/settings.h"

namespace isobit::trainer {

class Learner {
 public:
  // Loads recipe.model. Errors: those of Decoder::Load and AdamW::Create.
  static absl::StatusOr<std::unique_ptr<Learner>> Load(const Recipe& recipe);

  const ModelConfig& config() const { return decoder_->config(); }

  struct Differentiated {
    Logprobs logprobs;   // of the pass that was differentiated
    double entropy = 0;  // the mean over the batch's tokens, in nats
  };
  // Leaves the batch's gradient in the parameters. advantages: one per completion. Errors: those of
  // MakeBatch and Decoder::Score; CANCELLED: StopAsked. After an error the caller must drop the
  // gradients.
  absl::StatusOr<Differentiated> Gradients(absl::Span<const Completion> completions,
                                           absl::Span<const double> advantages);

  // One optimizer step. Returns the gradient's norm before clipping. INVALID_ARGUMENT: a gradient
  // is not finite; nothing is updated.
  absl::StatusOr<double> Step();

  // Drops the gradients.
  void Drop();

  // The bf16 weights, vectors first: they are small, so a block of the services is complete as soon
  // as its matrices arrive. The data belong to this object and change with the next step.
  std::vector<Tensor> Weights() const;

  // Masters and moments, fp32; the data belong to this object.
  std::vector<Tensor> State();

  // Restores what State returned after `steps` optimizer steps. INVALID_ARGUMENT: the state is of
  // another model.
  absl::Status Restore(absl::Span<const Tensor> state, int64_t steps);

  // Writes a model directory that the services can serve.
  absl::Status Save(const std::string& directory) const { return decoder_->Save(directory); }

 private:
  Learner(const Recipe& recipe, std::shared_ptr<front::Decoder> decoder, front::AdamW optimizer);

  absl::StatusOr<Differentiated> TryGradients(absl::Span<const Completion> completions,
                                              absl::Span<const double> advantages);
  // Differentiates one slot of the batch, and appends its logprobs and entropies.
  absl::Status AddPass(absl::Span<const Completion> completions,
                       absl::Span<const double> advantages, absl::Span<const int64_t> packs,
                       float token_weight, Logprobs* logprobs, std::vector<double>* entropies);
  // The tensors of the optimizer's state, by their names in a checkpoint.
  std::map<std::string, torch::Tensor> NamedState();

  const Recipe recipe_;
  const std::shared_ptr<front::Decoder> decoder_;
  const front::NamedParameters parameters_;
  front::AdamW optimizer_;
};

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_LEARNER_H_
