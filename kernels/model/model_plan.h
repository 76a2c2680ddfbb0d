// A model as a list of blocks. Everything that depends on what layers a model has walks this list:
// the forward pass, the layout of weights, the memory of sequences, a trainer's modules.
#ifndef ISOBIT_KERNELS_MODEL_MODEL_PLAN_H_
#define ISOBIT_KERNELS_MODEL_MODEL_PLAN_H_

#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/tensor_plan.h"
#include "kernels/blocks/block.h"
#include "kernels/blocks/embedding.h"
#include "kernels/blocks/head.h"

namespace isobit {

struct ModelPlan : TensorPlan {
  // The plan of a config that ValidateModelConfig accepts. Implicit: what takes a plan takes a
  // config, too.
  ModelPlan(const ModelConfig& model);  // NOLINT(google-explicit-constructor)

  // Adds a block of class Kind behind the others, as a part of decoder layer `layer`, whose tensors
  // are called "model.layers.<layer>.<module>".
  template <typename Kind>
  void Append(int layer);

  // blocks[i] has parameters[i + 1]; the embedding's are the first, the head's the last.
  std::shared_ptr<const Embedding> embedding;
  std::vector<std::shared_ptr<const Block>> blocks;
  std::shared_ptr<const Head> head;
};

// ---- Implementation

template <typename Kind>
void ModelPlan::Append(int layer) {
  const bool continues = !blocks.empty() && blocks.back()->layer() == layer;
  ParameterTable table(absl::StrCat("model.layers.", layer, "."));
  blocks.push_back(std::make_shared<Kind>(
      config, layer, continues ? blocks.back()->index_in_layer() + 1 : 0, table));
  parameters.insert(parameters.end() - 1, table.rows());
}

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_MODEL_PLAN_H_
