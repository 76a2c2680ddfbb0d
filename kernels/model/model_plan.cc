// Which blocks each architecture has.
#include "kernels/model/model_plan.h"

#include "common/checkpoint/tensor_names.h"
#include "kernels/blocks/attention.h"
#include "kernels/blocks/gated_mlp.h"

namespace isobit {

ModelPlan::ModelPlan(const ModelConfig& model) {
  config = model;
  ParameterTable first, last;
  embedding = std::make_shared<Embedding>(config, first);
  head = std::make_shared<Head>(config, last);
  parameters = {first.rows(), last.rows()};
  if (config.tie_word_embeddings) tied = {{.name = kHeadName, .same_as = kEmbeddingName}};
  // Llama, Mistral, Qwen2 and Qwen3 differ in what the blocks leave out.
  for (int layer = 0; layer < config.num_layers; ++layer) {
    Append<Attention>(layer);
    Append<GatedMlp>(layer);
  }
}

}  // namespace isobit
