// config.json as it is found in the wild, and every refusal.
#include "common/checkpoint/model_config.h"

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/common/checkpoint/config_json.h"
#include "tests/support/bitwise.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::Base;
using testing_support::BitwiseEqual;
using testing_support::StatusIs;
using testing_support::TempDir;
using testing_support::With;

absl::StatusOr<ModelConfig> Parse(const json& config) { return ParseModelConfig(config.dump()); }

TEST(ModelConfigTest, SmolLm2AsPublished) {
  const json config = {
      {"architectures", json::array({"LlamaForCausalLM"})},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"bos_token_id", 1},
      {"eos_token_id", 2},
      {"hidden_act", "silu"},
      {"hidden_size", 576},
      {"initializer_range", 0.041666666666666664},
      {"intermediate_size", 1536},
      {"is_llama_config", true},
      {"max_position_embeddings", 8192},
      {"mlp_bias", false},
      {"model_type", "llama"},
      {"num_attention_heads", 9},
      {"num_hidden_layers", 30},
      {"num_key_value_heads", 3},
      {"pad_token_id", 2},
      {"pretraining_tp", 1},
      {"rms_norm_eps", 1e-05},
      {"rope_interleaved", false},
      {"rope_scaling", nullptr},
      {"rope_theta", 100000},
      {"tie_word_embeddings", true},
      {"torch_dtype", "bfloat16"},
      {"transformers.js_config", {{"kv_cache_dtype", {{"q4f16", "float16"}}}}},
      {"transformers_version", "4.42.3"},
      {"use_cache", true},
      {"vocab_size", 49152},
  };
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig parsed, Parse(config));
  EXPECT_EQ(parsed.architecture, Architecture::kLlama);
  EXPECT_EQ(parsed.num_layers, 30);
  EXPECT_EQ(parsed.head_dim, 64);
  EXPECT_EQ(parsed.rope_theta, 100000);
  EXPECT_TRUE(BitwiseEqual(parsed.rms_norm_eps, 1e-5f));
  EXPECT_TRUE(parsed.tie_word_embeddings);
  EXPECT_FALSE(parsed.qkv_bias || parsed.o_bias || parsed.mlp_bias || parsed.qk_norm);
  EXPECT_THAT(parsed.eos_token_ids, ElementsAre(2));
  EXPECT_EQ(parsed.bos_token_id, 1);
  EXPECT_EQ(parsed.torch_dtype, DType::kBf16);
  EXPECT_EQ(parsed.WindowOfLayer(29), 0);
}

TEST(ModelConfigTest, Llama31Scaling) {
  json config = With(Base("LlamaForCausalLM"), {{"rope_theta", 500000.0},
                                                {"rope_scaling",
                                                 {{"factor", 8.0},
                                                  {"low_freq_factor", 1.0},
                                                  {"high_freq_factor", 4.0},
                                                  {"original_max_position_embeddings", 8192},
                                                  {"rope_type", "llama3"}}},
                                                {"eos_token_id", {10, 11, 12}}});
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig old_form, Parse(config));
  EXPECT_EQ(old_form.rope_scaling.type, RopeType::kLlama3);
  EXPECT_EQ(old_form.rope_scaling.factor, 8);
  EXPECT_EQ(old_form.rope_scaling.original_max_position_embeddings, 8192);
  EXPECT_THAT(old_form.eos_token_ids, ElementsAre(10, 11, 12));

  json parameters = config["rope_scaling"];
  parameters["rope_theta"] = 500000.0;
  config.erase("rope_theta");
  config.erase("rope_scaling");
  config["rope_parameters"] = parameters;
  config["dtype"] = "float16";
  config["layer_types"] = std::vector<std::string>(4, "full_attention");
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig new_form, Parse(config));
  EXPECT_EQ(new_form.CanonicalString(), old_form.CanonicalString());
  EXPECT_EQ(new_form.torch_dtype, DType::kF16);
}

TEST(ModelConfigTest, LinearScalingAndLlamaBiases) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(
      const ModelConfig config,
      Parse(With(Base("LlamaForCausalLM"), {{"rope_scaling", {{"type", "linear"}, {"factor", 2}}},
                                            {"attention_bias", true},
                                            {"mlp_bias", true}})));
  EXPECT_EQ(config.rope_scaling.type, RopeType::kLinear);
  EXPECT_EQ(config.rope_scaling.factor, 2);
  EXPECT_TRUE(config.qkv_bias && config.o_bias && config.mlp_bias);
}

TEST(ModelConfigTest, OldLlamaDefaults) {
  json config = Base("LlamaForCausalLM");
  config.erase("num_key_value_heads");
  config.erase("head_dim");
  config.erase("rope_theta");
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig parsed, Parse(config));
  EXPECT_EQ(parsed.num_kv_heads, 9);
  EXPECT_EQ(parsed.head_dim, 64);
  EXPECT_EQ(parsed.rope_theta, 10000);
  EXPECT_EQ(parsed.torch_dtype, DType::kF32);
  EXPECT_TRUE(parsed.eos_token_ids.empty());
  EXPECT_EQ(parsed.bos_token_id, -1);
}

TEST(ModelConfigTest, QwenBiasesAndNorms) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig qwen2,
                              Parse(With(Base("Qwen2ForCausalLM"), {{"use_mrope", false}})));
  EXPECT_TRUE(qwen2.qkv_bias && !qwen2.o_bias && !qwen2.qk_norm);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig qwen3,
                              Parse(With(Base("Qwen3ForCausalLM"), {{"attention_bias", true}})));
  EXPECT_TRUE(qwen3.qkv_bias && qwen3.o_bias && qwen3.qk_norm);
}

TEST(ModelConfigTest, SlidingWindowsAsTransformersAppliesThem) {
  const json full_half = {"full_attention", "sliding_attention", "full_attention",
                          "sliding_attention"};
  const struct {
    const char* architecture;
    json changes;
    std::vector<int> windows;
  } kCases[] = {
      {"MistralForCausalLM", json::object(), {4096, 4096, 4096, 4096}},
      {"MistralForCausalLM", {{"sliding_window", nullptr}}, {}},
      {"MistralForCausalLM", {{"sliding_window", 7}}, {7, 7, 7, 7}},
      {"Qwen2ForCausalLM",
       {{"use_sliding_window", true}, {"sliding_window", nullptr}, {"max_window_layers", 0}},
       {}},
      {"Qwen3ForCausalLM",
       {{"use_sliding_window", true}, {"sliding_window", nullptr}, {"max_window_layers", 0}},
       {}},
      {"Qwen3ForCausalLM",
       {{"use_sliding_window", true}, {"max_window_layers", 2}},
       {0, 0, 4096, 4096}},
      {"Qwen3ForCausalLM", {{"use_sliding_window", false}, {"sliding_window", 0}}, {}},
      {"Qwen2ForCausalLM", {{"sliding_window", 7}, {"max_window_layers", 0}}, {}},
      {"Qwen2ForCausalLM", {{"use_sliding_window", false}, {"sliding_window", 7}}, {}},
      {"Qwen2ForCausalLM", {{"use_sliding_window", true}, {"sliding_window", 7}}, {}},
      {"Qwen2ForCausalLM",
       {{"use_sliding_window", true}, {"sliding_window", 7}, {"max_window_layers", 3}},
       {0, 0, 0, 7}},
      {"Qwen3ForCausalLM",
       {{"use_sliding_window", true}, {"sliding_window", 7}, {"layer_types", full_half}},
       {0, 7, 0, 7}},
  };
  for (const auto& test : kCases) {
    const json config = With(Base(test.architecture), test.changes);
    // update() keeps a null; the merge below must not drop it, since for Mistral it means no
    // window.
    ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig parsed, Parse(config));
    EXPECT_EQ(parsed.layer_windows, test.windows) << config;
  }
}

TEST(ModelConfigTest, GenerationConfigWins) {
  const std::string config =
      With(Base("LlamaForCausalLM"), {{"eos_token_id", 2}, {"bos_token_id", 1}}).dump();
  ISOBIT_ASSERT_OK_AND_ASSIGN(
      const ModelConfig parsed,
      ParseModelConfig(config, R"({"eos_token_id":[5,6],"temperature":0.6,"top_p":0.9})"));
  EXPECT_THAT(parsed.eos_token_ids, ElementsAre(5, 6));
  EXPECT_EQ(parsed.bos_token_id, 1);
  EXPECT_THAT(ParseModelConfig(config, R"({"eos_token_id":1000})"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("eos_token_id is 1000")));
  EXPECT_THAT(ParseModelConfig(config, "[]"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("generation_config.json")));
}

TEST(ModelConfigTest, EachRefusalNamesTheField) {
  const struct {
    const char* architecture;
    json changes;
    const char* message;
  } kCases[] = {
      // Not honoured.
      {"LlamaForCausalLM", {{"quantization_config", {{"bits", 4}}}}, "\"quantization_config\""},
      {"LlamaForCausalLM", {{"logit_scale", 2}}, "\"logit_scale\" is not supported (value \"2\")"},
      {"LlamaForCausalLM", {{"sliding_window", 7}}, "\"sliding_window\""},
      {"LlamaForCausalLM", {{"auto_map", {{"AutoConfig", "x.Y"}}}}, "\"auto_map\""},
      {"LlamaForCausalLM",
       {{"hidden_act", "gelu"}},
       "hidden_act is \"\\\"gelu\\\"\", but only \"silu\" or \"swish\" is supported"},
      {"LlamaForCausalLM", {{"is_causal", false}}, "is_causal is"},
      {"LlamaForCausalLM", {{"is_causal", nullptr}}, "is_causal is null"},
      {"LlamaForCausalLM", {{"per_layer_config", {{"0", 1}}}}, "\"per_layer_config\""},
      {"LlamaForCausalLM", {{"partial_rotary_factor", 0.5}}, "partial_rotary_factor is"},
      {"LlamaForCausalLM", {{"rope_interleaved", true}}, "rope_interleaved is"},
      {"LlamaForCausalLM", {{"model_type", "mistral"}}, "model_type is"},
      {"LlamaForCausalLM",
       {{"layer_types",
         {"full_attention", "full_attention", "full_attention", "sliding_attention"}}},
       "layer_types[3]"},
      {"MistralForCausalLM", {{"attention_bias", true}}, "attention_bias is"},
      {"MistralForCausalLM", {{"mlp_bias", true}}, "mlp_bias is \"true\""},
      {"Qwen2ForCausalLM", {{"use_mrope", true}}, "use_mrope is"},
      {"Qwen2ForCausalLM", {{"attention_bias", false}}, "\"attention_bias\""},
      {"Qwen3ForCausalLM", {{"num_experts", 8}}, "\"num_experts\""},
      {"Qwen3ForCausalLM",
       {{"layer_types",
         {"full_attention", "full_attention", "full_attention", "sliding_attention"}}},
       "layer_types[3] is sliding"},
      {"Qwen3ForCausalLM",
       {{"layer_types", {"linear_attention", "a", "b", "c"}}},
       "layer_types[0] is"},
      {"Qwen3ForCausalLM", {{"layer_types", {"full_attention"}}}, "layer_types must be"},
      {"LlamaForCausalLM",
       {{"rope_scaling", {{"type", "dynamic"}, {"factor", 4}}}},
       "rope_scaling.rope_type is \"dynamic\", supported: default, linear, llama3, yarn"},
      {"Qwen3ForCausalLM",
       {{"rope_scaling", {{"type", "yarn"}, {"factor", 0.5}}}},
       "rope_scaling.factor is 0.5"},
      {"Qwen3ForCausalLM",
       {{"rope_scaling", {{"type", "yarn"}, {"factor", 4}, {"attention_factor", 0}}}},
       "attention_factor is 0"},
      {"Qwen3ForCausalLM",
       {{"rope_scaling", {{"type", "yarn"}, {"factor", 4}, {"beta_slow", 32}}}},
       "beta_fast is 32, expected more than beta_slow, 32"},
      {"Qwen3ForCausalLM",
       {{"rope_theta", 1}, {"rope_scaling", {{"type", "yarn"}, {"factor", 4}}}},
       "rope_theta is 1, expected 1.001"},
      {"LlamaForCausalLM",
       {{"rope_scaling", {{"type", "linear"}, {"factor", 4}, {"beta", 1}}}},
       "\"rope_scaling.beta\""},
      {"LlamaForCausalLM",
       {{"rope_scaling", {{"rope_type", "default"}, {"factor", 4}}}},
       "\"rope_scaling.factor\""},
      {"LlamaForCausalLM",
       {{"rope_scaling", {{"rope_type", "llama3"}, {"factor", 4}}}},
       "rope_scaling.low_freq_factor is missing"},
      {"LlamaForCausalLM", {{"rope_scaling", "linear"}}, "rope_scaling must be an object"},
      {"LlamaForCausalLM",
       {{"rope_scaling", {{"type", "linear"}, {"factor", 4}}},
        {"rope_parameters", {{"rope_type", "default"}}}},
       "both given"},
      {"LlamaForCausalLM",
       {{"rope_parameters", {{"rope_theta", 5}}}},
       "rope_parameters.rope_theta is 5, but rope_theta is 100000"},
      {"LlamaForCausalLM",
       {{"rope_parameters", {{"full_attention", {{"rope_theta", 5}}}}}},
       "\"rope_parameters.full_attention\""},
      {"LlamaForCausalLM", {{"torch_dtype", "int8"}}, "torch_dtype is \"int8\""},
      {"LlamaForCausalLM", {{"torch_dtype", "float16"}, {"dtype", "bfloat16"}}, "dtype is"},
      // Mistyped, missing or out of range.
      {"OtherForCausalLM", json::object(), "\"OtherForCausalLM\", supported: Llama (Llama"},
      {"MixtralForCausalLM", json::object(), "(Mixtral: mixture of experts: "},
      {"LlamaForCausalLM", {{"architectures", json::array()}}, "architectures must be"},
      {"LlamaForCausalLM", {{"hidden_size", "576"}}, "hidden_size must be an integer"},
      {"LlamaForCausalLM", {{"hidden_size", 576.0}}, "hidden_size must be an integer"},
      {"LlamaForCausalLM", {{"hidden_size", nullptr}}, "field hidden_size is missing"},
      {"LlamaForCausalLM", {{"hidden_size", 4294967297}}, "hidden_size must be an integer of 32"},
      {"LlamaForCausalLM", {{"hidden_size", -4294967297}}, "hidden_size must be an integer of 32"},
      {"LlamaForCausalLM", {{"hidden_size", 0}}, "hidden_size is 0, expected 1 to 65536"},
      {"LlamaForCausalLM", {{"vocab_size", 1 << 30}}, "vocab_size is 1073741824"},
      {"LlamaForCausalLM", {{"intermediate_size", -1}}, "intermediate_size is -1"},
      {"LlamaForCausalLM", {{"num_hidden_layers", 2000000000}}, "num_hidden_layers is"},
      {"LlamaForCausalLM", {{"num_attention_heads", 0}}, "num_attention_heads is 0"},
      {"LlamaForCausalLM", {{"num_key_value_heads", 0}}, "num_key_value_heads is 0"},
      {"LlamaForCausalLM", {{"num_key_value_heads", 2}}, "a multiple of num_key_value_heads, 2"},
      {"LlamaForCausalLM", {{"head_dim", 63}}, "head_dim is 63, expected an even number"},
      {"LlamaForCausalLM", {{"head_dim", 512}}, "head_dim is 512, expected 2 to 256"},
      {"Qwen3ForCausalLM", {{"head_dim", nullptr}}, "head_dim is missing"},
      {"LlamaForCausalLM", {{"rms_norm_eps", 0}}, "rms_norm_eps is 0"},
      {"LlamaForCausalLM", {{"rms_norm_eps", 0.100001}}, "rms_norm_eps is 0.100001"},
      {"LlamaForCausalLM", {{"rms_norm_eps", 9.9e-13}}, "expected 1e-12 to 0.1"},
      {"LlamaForCausalLM", {{"rms_norm_eps", 1e300}}, "rms_norm_eps is inf"},
      {"LlamaForCausalLM", {{"rms_norm_eps", "x"}}, "rms_norm_eps must be a number"},
      {"LlamaForCausalLM", {{"rope_theta", -1}}, "rope_theta is -1"},
      {"LlamaForCausalLM", {{"max_position_embeddings", 0}}, "max_position_embeddings is 0"},
      {"LlamaForCausalLM", {{"tie_word_embeddings", 1}}, "tie_word_embeddings must be true or"},
      {"LlamaForCausalLM", {{"eos_token_id", {1, "2"}}}, "eos_token_id must be an integer"},
      {"LlamaForCausalLM", {{"eos_token_id", -1}}, "eos_token_id is -1"},
      {"LlamaForCausalLM", {{"bos_token_id", 1000}}, "bos_token_id is 1000"},
      {"MistralForCausalLM", {{"sliding_window", -5}}, "sliding_window is -5"},
      {"MistralForCausalLM", {{"sliding_window", 0}}, "sliding_window is 0, expected null"},
      {"Qwen2ForCausalLM",
       {{"use_sliding_window", true}, {"sliding_window", 0}},
       "sliding_window is 0, expected null"},
      {"LlamaForCausalLM",
       {{"rope_scaling", {{"type", "linear"}, {"factor", 0.5}}}},
       "rope_scaling.factor is 0.5"},
      {"LlamaForCausalLM",
       {{"rope_scaling",
         {{"rope_type", "llama3"},
          {"factor", 8},
          {"low_freq_factor", 4},
          {"high_freq_factor", 4}}}},
       "rope_scaling.high_freq_factor is 4"},
  };
  for (const auto& test : kCases) {
    const json config = With(Base(test.architecture), test.changes);
    EXPECT_THAT(Parse(config),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(test.message)))
        << config;
  }
  EXPECT_THAT(ParseModelConfig("{\"vocab_size\":1,\"vocab_size\":2}"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("occurs twice")));
  json missing = Base("Qwen3ForCausalLM");
  missing.erase("num_key_value_heads");
  EXPECT_THAT(Parse(missing), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("num_key_value_heads is missing")));
}

TEST(ModelConfigTest, BoundsAreWithin) {
  for (const double eps : {1e-12, 0.1}) {
    ISOBIT_EXPECT_OK(Parse(With(Base("LlamaForCausalLM"), {{"rms_norm_eps", eps}})).status());
  }
  EXPECT_THAT(ParseModelConfig("{\"hidden_size\": 8, \"rms_norm_eps\": NaN}"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"rms_norm_eps\"")));
}

TEST(ModelConfigTest, CanonicalStringSeesEveryNumericField) {
  ModelConfig base;
  base.num_layers = 2;
  const std::vector<void (*)(ModelConfig&)> changes = {
      [](ModelConfig& c) { c.vocab_size = 9; },
      [](ModelConfig& c) { c.hidden_size = 9; },
      [](ModelConfig& c) { c.intermediate_size = 9; },
      [](ModelConfig& c) { c.num_layers = 9; },
      [](ModelConfig& c) { c.num_heads = 9; },
      [](ModelConfig& c) { c.num_kv_heads = 9; },
      [](ModelConfig& c) { c.head_dim = 8; },
      [](ModelConfig& c) { c.rms_norm_eps = 0x1.000002p-17f; },
      [](ModelConfig& c) { c.rope_theta = 10000.000000000002; },
      [](ModelConfig& c) { c.rope_scaling.type = RopeType::kLinear; },
      [](ModelConfig& c) { c.rope_scaling.type = RopeType::kLlama3; },
      [](ModelConfig& c) { c.rope_scaling = {.type = RopeType::kYarn}; },
      [](ModelConfig& c) { c.rope_scaling = {.type = RopeType::kYarn, .factor = 2}; },
      [](ModelConfig& c) {
        c.rope_scaling = {.type = RopeType::kYarn, .original_max_position_embeddings = 8};
      },
      [](ModelConfig& c) { c.rope_scaling = {.type = RopeType::kYarn, .beta_fast = 8}; },
      [](ModelConfig& c) { c.rope_scaling = {.type = RopeType::kYarn, .beta_slow = 8}; },
      [](ModelConfig& c) { c.rope_scaling = {.type = RopeType::kYarn, .truncate = false}; },
      [](ModelConfig& c) { c.rope_scaling = {.type = RopeType::kYarn, .attention_factor = 2}; },
      [](ModelConfig& c) { c.rope_scaling = {.type = RopeType::kYarn, .mscale = 2}; },
      [](ModelConfig& c) { c.rope_scaling = {.type = RopeType::kYarn, .mscale_all_dim = 2}; },
      [](ModelConfig& c) { c.tie_word_embeddings = true; },
      [](ModelConfig& c) { c.qkv_bias = true; },
      [](ModelConfig& c) { c.o_bias = true; },
      [](ModelConfig& c) { c.mlp_bias = true; },
      [](ModelConfig& c) { c.qk_norm = true; },
      [](ModelConfig& c) {
        c.layer_windows = {0, 4};
      },
  };
  std::vector<std::string> seen = {base.CanonicalString()};
  for (const auto& change : changes) {
    ModelConfig config = base;
    change(config);
    EXPECT_THAT(seen, testing::Not(testing::Contains(config.CanonicalString())));
    seen.push_back(config.CanonicalString());
  }
  ModelConfig same = base;
  same.layer_windows = {0, 0};
  same.eos_token_ids = {7};
  EXPECT_EQ(same.CanonicalString(), base.CanonicalString());
}

TEST(ModelConfigTest, WritesWhatItReads) {
  const std::vector<json> configs = {
      With(Base("LlamaForCausalLM"), {{"attention_bias", true},
                                      {"mlp_bias", true},
                                      {"rope_scaling",
                                       {{"rope_type", "llama3"},
                                        {"factor", 8},
                                        {"low_freq_factor", 1},
                                        {"high_freq_factor", 4}}},
                                      {"torch_dtype", "float16"},
                                      {"eos_token_id", {1, 2}}}),
      With(Base("LlamaForCausalLM"), {{"rope_scaling", {{"type", "linear"}, {"factor", 2.5}}}}),
      With(Base("MistralForCausalLM"), {{"sliding_window", 31}, {"bos_token_id", 3}}),
      With(Base("MistralForCausalLM"), {{"sliding_window", nullptr}}),
      With(Base("Qwen2ForCausalLM"), {{"use_sliding_window", true},
                                      {"sliding_window", 7},
                                      {"max_window_layers", 3},
                                      {"torch_dtype", "bfloat16"}}),
      With(Base("Qwen2ForCausalLM"), {{"tie_word_embeddings", true}}),
      With(Base("Qwen3ForCausalLM"), {{"attention_bias", true}, {"rms_norm_eps", 1e-6}}),
      With(Base("Qwen3ForCausalLM"),
           {{"rope_scaling",
             {{"type", "yarn"}, {"factor", 4}, {"mscale", 1.5}, {"mscale_all_dim", 0.7}}}}),
      With(Base("Qwen2ForCausalLM"), {{"rope_scaling",
                                       {{"type", "yarn"},
                                        {"factor", 2.5},
                                        {"original_max_position_embeddings", 8192},
                                        {"beta_fast", 24},
                                        {"beta_slow", 0.5},
                                        {"truncate", false},
                                        {"attention_factor", 1.25}}}}),
  };
  for (const json& original : configs) {
    const TempDir dir;
    ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig config, Parse(original));
    ISOBIT_ASSERT_OK(WriteConfigJson(config, dir.path()));
    ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig read, LoadModelConfig(dir.path()));
    EXPECT_EQ(read.CanonicalString(), config.CanonicalString());
    EXPECT_EQ(read.architecture, config.architecture);
    EXPECT_EQ(read.eos_token_ids, config.eos_token_ids);
    EXPECT_EQ(read.bos_token_id, config.bos_token_id);
    EXPECT_EQ(read.torch_dtype, config.torch_dtype);
    EXPECT_EQ(read.max_position_embeddings, config.max_position_embeddings);
    EXPECT_EQ(read.layer_windows, config.layer_windows);
  }
}

TEST(ModelConfigTest, WriterRefusesWhatTheArchitectureCannotSay) {
  const TempDir dir;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig base, Parse(Base("Qwen2ForCausalLM")));
  ModelConfig config = base;
  config.o_bias = true;
  EXPECT_THAT(WriteConfigJson(config, dir.path()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("q, k and v have biases")));
  config = base;
  config.mlp_bias = true;
  EXPECT_THAT(WriteConfigJson(config, dir.path()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("mlp_bias")));
  config = base;
  config.layer_windows = {0, 3, 4, 0};
  EXPECT_THAT(WriteConfigJson(config, dir.path()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("expected one width")));
  config.layer_windows = {0, 3};
  EXPECT_THAT(WriteConfigJson(config, dir.path()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("layer_types has 2")));
}

TEST(ModelConfigTest, LoadNeedsTheFile) {
  const TempDir dir;
  EXPECT_THAT(LoadModelConfig(dir.path()),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("config.json")));
  dir.Write("config.json", std::string((4 << 20) + 1, ' '));
  EXPECT_THAT(LoadModelConfig(dir.path()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("limit 4194304")));
}

TEST(ModelConfigTest, SettingsAreWhatElseChangesTokens) {
  const auto settings = [](const json& change, const std::string& generation = "") {
    return ParseModelConfig(With(Base("LlamaForCausalLM"), change).dump(), generation)->Settings();
  };
  EXPECT_EQ(settings({{"eos_token_id", 7}}), "eos_token_ids=7 max_position_embeddings=8192");
  EXPECT_EQ(settings({{"eos_token_id", {9, 7, 9}}}),
            "eos_token_ids=7,9 max_position_embeddings=8192");
  EXPECT_EQ(settings({{"eos_token_id", 7}}, R"({"eos_token_id": [5, 3]})"),
            "eos_token_ids=3,5 max_position_embeddings=8192");
  EXPECT_EQ(settings({{"eos_token_id", 7}}, R"({"eos_token_id": null})"),
            "eos_token_ids=7 max_position_embeddings=8192");
  EXPECT_EQ(settings({{"eos_token_id", nullptr}, {"max_position_embeddings", 64}}),
            "eos_token_ids=none max_position_embeddings=64");
  EXPECT_THAT(Parse(With(Base("LlamaForCausalLM"), {{"eos_token_id", std::vector<int>(65, 1)}})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most 64")));
}

TEST(ModelConfigTest, AnAdapterBesideTheBaseIsRefused) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig config, Parse(Base("LlamaForCausalLM")));
  for (const char* name :
       {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}) {
    const TempDir dir;
    ISOBIT_ASSERT_OK(WriteConfigJson(config, dir.path()));
    ISOBIT_EXPECT_OK(LoadModelConfig(dir.path()));
    dir.Write(name, "{}");
    EXPECT_THAT(LoadModelConfig(dir.path()),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(name)));
  }
}

}  // namespace
}  // namespace isobit
