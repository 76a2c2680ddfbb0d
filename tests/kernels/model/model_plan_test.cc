// The tables: which parameters each architecture has, with the checkpoint's names and shapes.
#include "kernels/model/model_plan.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace isobit {
namespace {

using testing::ElementsAre;

ModelConfig TinyConfig(Architecture architecture) {
  ModelConfig config;
  config.architecture = architecture;
  config.vocab_size = 5;
  config.hidden_size = 7;
  config.intermediate_size = 11;
  config.num_layers = 2;
  config.num_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 2;
  config.qk_norm = architecture == Architecture::kQwen3;
  config.qkv_bias = architecture == Architecture::kQwen2;
  return config;
}

std::vector<int64_t> ShapeOf(const std::vector<ExpectedTensor>& specs, const std::string& name) {
  for (const ExpectedTensor& spec : specs) {
    if (spec.name == name) return spec.shape;
  }
  return {-1};
}

std::vector<std::string> NamesOf(const Parameter& parameter) {
  std::vector<std::string> names;
  for (const TensorSpec& tensor : parameter.tensors) names.push_back(tensor.name);
  return names;
}

TEST(ModelPlanTest, ShapesFollowHeadsNotHiddenSize) {
  const auto specs = ExpectedTensors(ModelPlan(TinyConfig(Architecture::kQwen3)));
  EXPECT_THAT(ShapeOf(specs, "model.layers.1.self_attn.q_proj.weight"), ElementsAre(18, 7));
  EXPECT_THAT(ShapeOf(specs, "model.layers.1.self_attn.k_proj.weight"), ElementsAre(6, 7));
  EXPECT_THAT(ShapeOf(specs, "model.layers.1.self_attn.o_proj.weight"), ElementsAre(7, 18));
  EXPECT_THAT(ShapeOf(specs, "model.layers.1.self_attn.q_norm.weight"), ElementsAre(2));
  EXPECT_THAT(ShapeOf(specs, "model.layers.0.mlp.down_proj.weight"), ElementsAre(7, 11));
  EXPECT_THAT(ShapeOf(specs, "lm_head.weight"), ElementsAre(5, 7));
  EXPECT_EQ(specs.size(), 3u + 2 * 11);
}

TEST(ModelPlanTest, BiasesAndTyingFollowTheConfig) {
  ModelConfig config = TinyConfig(Architecture::kQwen2);
  auto specs = ExpectedTensors(ModelPlan(config));
  EXPECT_THAT(ShapeOf(specs, "model.layers.0.self_attn.v_proj.bias"), ElementsAre(6));
  EXPECT_THAT(ShapeOf(specs, "model.layers.0.self_attn.o_proj.bias"), ElementsAre(-1));
  EXPECT_EQ(specs.size(), 3u + 2 * 12);
  config = TinyConfig(Architecture::kLlama);
  config.qkv_bias = config.o_bias = config.mlp_bias = config.tie_word_embeddings = true;
  specs = ExpectedTensors(ModelPlan(config));
  EXPECT_THAT(ShapeOf(specs, "model.layers.0.self_attn.o_proj.bias"), ElementsAre(7));
  EXPECT_THAT(ShapeOf(specs, "model.layers.0.mlp.gate_proj.bias"), ElementsAre(11));
  EXPECT_EQ(specs.size(), 2u + 2 * 16);
}

TEST(ModelPlanTest, ABiasIsCutAsTheOutputsOfItsLayerAre) {
  ModelConfig config = TinyConfig(Architecture::kLlama);
  config.qkv_bias = config.o_bias = true;
  const std::vector<Parameter> layer = ModelPlan(config).parameters[1];
  const Parameter& qkv_bias = *FindParameter(layer, "qkv_bias");
  EXPECT_THAT(NamesOf(qkv_bias), ElementsAre("model.layers.0.self_attn.q_proj.bias",
                                             "model.layers.0.self_attn.k_proj.bias",
                                             "model.layers.0.self_attn.v_proj.bias"));
  EXPECT_EQ(qkv_bias.cut, Cut::kColumnParallel);
  EXPECT_EQ(qkv_bias.units, 3);
  EXPECT_EQ(qkv_bias.packed, DType::kF32);
  EXPECT_EQ(FindParameter(layer, "o")->cut, Cut::kRowParallel);
  EXPECT_EQ(FindParameter(layer, "o_bias")->cut, Cut::kReplicated);
  EXPECT_EQ(FindParameter(ModelPlan(config).parameters[2], "down_bias"), nullptr);
}

TEST(ModelPlanTest, ATiedHeadIsTheEmbeddingsTensorAndCountsOnce) {
  ModelConfig config = TinyConfig(Architecture::kLlama);
  const uint64_t untied = NumParameters(ModelPlan(config));
  EXPECT_EQ(untied, 2u * 5 * 7 + 7 + 2 * (2 * 7 + 2 * 18 * 7 + 2 * 6 * 7 + 3 * 7 * 11));
  EXPECT_TRUE(ModelPlan(config).tied.empty());
  config.tie_word_embeddings = true;
  const ModelPlan tied(config);
  EXPECT_THAT(NamesOf(*FindParameter(tied.parameters.back(), "head")),
              ElementsAre("model.embed_tokens.weight"));
  EXPECT_EQ(NumParameters(tied), untied - 5 * 7);
}

}  // namespace
}  // namespace isobit
