// Fields that isobit ignores, by itself or when told to, and yarn, in configs as users have them.
#include "common/checkpoint/config_fields.h"

#include <string>
#include <utility>
#include <vector>

#include "common/checkpoint/model_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/checkpoint/config_json.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::Base;
using testing_support::StatusIs;
using testing_support::With;

absl::StatusOr<ModelConfig> Parse(const json& config) { return ParseModelConfig(config.dump()); }

absl::StatusOr<ModelConfig> ParseIgnoring(const json& config, std::vector<std::string> fields) {
  return ParseModelConfig(config.dump(), "", {.ignored_fields = std::move(fields)});
}

TEST(ConfigFieldsTest, WhatChangesNothingAtInferenceStopsNoModel) {
  for (const char* architecture :
       {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}) {
    ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig plain, Parse(Base(architecture)));
    for (const json& change : std::vector<json>{{{"attention_dropout", 0.1}},
                                                {{"hidden_act", "swish"}},
                                                {{"pretraining_tp", 2}},
                                                {{"temperature", 0.6}, {"do_sample", true}},
                                                {{"id2label", {{"0", "a"}}}},
                                                {{"is_causal", true}},
                                                {{"attention_dropout", nullptr}}}) {
      ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig changed,
                                  Parse(With(Base(architecture), change)));
      EXPECT_EQ(changed.CanonicalString(), plain.CanonicalString()) << change;
      EXPECT_THAT(changed.ignored_fields, testing::IsEmpty());
    }
    ISOBIT_ASSERT_OK_AND_ASSIGN(
        const ModelConfig ungrouped,
        Parse(With(Base(architecture), {{"num_key_value_heads", nullptr}})));
    EXPECT_EQ(ungrouped.num_kv_heads, 9);
  }
}

TEST(ConfigFieldsTest, YarnAsQwenStatesIt) {
  const json yarn = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 8192}};
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig config,
                              Parse(With(Base("Qwen3ForCausalLM"), {{"rope_scaling", yarn}})));
  EXPECT_EQ(config.rope_scaling.type, RopeType::kYarn);
  EXPECT_EQ(config.rope_scaling.factor, 4);
  EXPECT_EQ(config.rope_scaling.original_max_position_embeddings, 8192);
  EXPECT_EQ(config.rope_scaling.beta_fast, 32);
  EXPECT_EQ(config.rope_scaling.beta_slow, 1);
  EXPECT_TRUE(config.rope_scaling.truncate);
  EXPECT_EQ(config.rope_scaling.attention_factor, 0);  // derived
  EXPECT_EQ(config.max_position_embeddings, 32768);    // stated: 8192

  const auto parse = [&](const json& changes, int positions = 8192) {
    return *Parse(With(Base("Qwen3ForCausalLM"), {{"rope_scaling", With(yarn, changes)},
                                                  {"max_position_embeddings", positions}}));
  };
  EXPECT_EQ(parse(json::object(), 40960).max_position_embeddings, 40960);
  const ModelConfig all = parse({{"beta_fast", 16},
                                 {"beta_slow", 0},
                                 {"truncate", false},
                                 {"mscale", 1},
                                 {"mscale_all_dim", 0.5}});
  EXPECT_EQ(all.rope_scaling.beta_fast, 16);
  EXPECT_EQ(all.rope_scaling.beta_slow, 1);  // as if absent
  EXPECT_FALSE(all.rope_scaling.truncate);
  EXPECT_EQ(all.rope_scaling.mscale, 1);
  EXPECT_EQ(all.rope_scaling.mscale_all_dim, 0.5);
  EXPECT_FALSE(parse({{"truncate", nullptr}}).rope_scaling.truncate);
  // One mscale alone counts for nothing, nor do both beside an attention_factor.
  EXPECT_EQ(parse({{"mscale", 2}}).CanonicalString(), config.CanonicalString());
  const json both = {{"mscale", 2}, {"mscale_all_dim", 1}, {"attention_factor", 1.5}};
  EXPECT_EQ(parse(both).CanonicalString(), parse({{"attention_factor", 1.5}}).CanonicalString());
  // Without the original length it is the present one.
  json implied = With(yarn, {{"original_max_position_embeddings", 4096}, {"factor", nullptr}});
  EXPECT_EQ(parse(implied).rope_scaling.factor, 2);
  implied = yarn;
  implied.erase("original_max_position_embeddings");
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig bare,
                              Parse(With(Base("Qwen3ForCausalLM"), {{"rope_scaling", implied}})));
  EXPECT_EQ(bare.rope_scaling.original_max_position_embeddings, 8192);
  EXPECT_EQ(bare.max_position_embeddings, 32768);
}

TEST(ConfigFieldsTest, IgnoresWhatItIsToldToIgnore) {
  const json config = With(Base("LlamaForCausalLM"),
                           {{"auto_map", {{"AutoConfig", "x.Y"}}},
                            {"partial_rotary_factor", 0.5},
                            {"rope_scaling", {{"type", "linear"}, {"factor", 4}, {"beta", 1}}}});
  const std::vector<std::string> names = {"auto_map", "partial_rotary_factor", "rope_scaling.beta",
                                          "of_no_config"};
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig parsed, ParseIgnoring(config, names));
  EXPECT_THAT(parsed.ignored_fields,
              testing::UnorderedElementsAre("\"partial_rotary_factor\" (value \"0.5\")",
                                            "\"rope_scaling.beta\" (value \"1\")",
                                            R"("auto_map" (value "{\"AutoConfig\":\"x.Y\"}"))"));
  EXPECT_THAT(
      ParseIgnoring(config, {"auto_map", "rope_scaling.beta"}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("partial_rotary_factor is \"0.5\", but only 1.0 is supported; if it "
                         "changes no logprob of this model, --ignore_config_fields")));
}

TEST(ConfigFieldsTest, RefusesToIgnoreWhatMakesTheModel) {
  const struct {
    json changes;
    const char* name;
    const char* message;
  } kCases[] = {
      {{{"hidden_act", "gelu"}}, "hidden_act", "names hidden_act, without which"},
      {{{"quantization_config", {{"bits", 4}}}},
       "quantization_config",
       "names quantization_config"},
      {{{"is_causal", false}}, "is_causal", "names is_causal"},
      {{{"rope_scaling", {{"type", "su"}}}}, "rope_scaling", "names rope_scaling"},
      // What is honoured is not ignored.
      {json::object(), "rope_theta", "names rope_theta, expected a field that isobit does not"},
      {{{"rope_scaling", {{"type", "linear"}, {"factor", 4}}}},
       "rope_scaling.factor",
       "names rope_scaling.factor"},
  };
  for (const auto& test : kCases) {
    EXPECT_THAT(ParseIgnoring(With(Base("LlamaForCausalLM"), test.changes), {test.name}),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(test.message)));
  }
  EXPECT_THAT(Parse(With(Base("LlamaForCausalLM"), {{"quantization_config", {{"bits", 4}}}})),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       testing::Not(HasSubstr("--ignore_config_fields"))));
}

TEST(ConfigFieldsTest, NamesTheSettingsOfGenerationThatNobodyApplies) {
  const std::string config =
      With(Base("LlamaForCausalLM"), {{"temperature", 0.6}, {"use_cache", true}}).dump();
  const json generation = {{"_from_model_config", true},
                           {"eos_token_id", 3},
                           {"bos_token_id", 2},
                           {"pad_token_id", 3},
                           {"top_k", 20},
                           {"suppress_tokens", {1, 2}},
                           {"top_h", 0.5},
                           {"min_p", nullptr},
                           {"transformers_version", "5"}};
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig parsed,
                              ParseModelConfig(config, generation.dump()));
  EXPECT_THAT(
      parsed.generation_fields,
      testing::UnorderedElementsAre("config.json: \"temperature\" (value \"0.6\")",
                                    "generation_config.json: \"top_k\" (value \"20\")",
                                    "generation_config.json: \"suppress_tokens\" (value \"[1,2]\")",
                                    "generation_config.json: \"top_h\" (value \"0.5\")"));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig plain, Parse(Base("LlamaForCausalLM")));
  EXPECT_THAT(plain.generation_fields, testing::IsEmpty());
}

}  // namespace
}  // namespace isobit
