// Compares how isobit and transformers read config.json, for every field that matters: missing,
// null, zero, usual and odd values (references/configs.json, made by make_config_references.py).
//
// What isobit accepts, transformers must accept with the same meaning. This file lists, with
// reasons, what isobit refuses although transformers accepts it, and what only isobit accepts.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/checkpoint/config_fields.h"
#include "common/checkpoint/model_config.h"
#include "gtest/gtest.h"
#include "kernels/contract/rope.h"
#include "kernels/model/numerics.h"
#include "nlohmann/json.hpp"

namespace isobit {
namespace {

using nlohmann::json;

struct Case {
  json base;     // a config.json that both accept
  json changes;  // fields to set
  json unset;    // names of fields to remove
  json meaning;  // for transformers; null if it refuses
  std::string error;

  json Config() const {
    json config = base;
    config.update(changes);
    for (const auto& name : unset) config.erase(name.get<std::string>());
    return config;
  }
  std::string Text() const { return absl::StrCat(changes.dump(), " without ", unset.dump()); }
};

std::vector<Case> ReadCases() {
  std::ifstream file(std::string(REFERENCES_DIRECTORY) + "/configs.json");
  const json references = json::parse(file);
  std::vector<Case> cases;
  json base, base_meaning;
  for (const json& line : references["cases"]) {
    if (line.contains("architecture")) {
      base = line["config"];
      base_meaning = line["meaning"];
      cases.push_back({base, json::object(), json::array(), base_meaning, ""});
      continue;
    }
    json meaning;
    if (line.contains("meaning")) {
      meaning = base_meaning;
      meaning.update(line["meaning"]);
    }
    cases.push_back({base, line["set"], line["unset"], meaning, line.value("error", "")});
  }
  return cases;
}

// The fields of transformers' answer, as isobit reads them. isobit has no other activation.
json MeaningOf(const ModelConfig& config) {
  std::vector<int> windows;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    windows.push_back(config.WindowOfLayer(layer));
  }
  return {{"vocab_size", config.vocab_size},
          {"hidden_size", config.hidden_size},
          {"intermediate_size", config.intermediate_size},
          {"num_layers", config.num_layers},
          {"num_heads", config.num_heads},
          {"num_kv_heads", config.num_kv_heads},
          {"head_dim", config.head_dim},
          {"tied", config.tie_word_embeddings},
          {"qkv_bias", config.qkv_bias},
          {"o_bias", config.o_bias},
          {"mlp_bias", config.mlp_bias},
          {"qk_norm", config.qk_norm},
          {"causal", true},
          {"windows", windows}};
}

// transformers computes frequencies in fp32, so they are compared to within its rounding.
void ExpectSameNumbers(const ModelConfig& config, const json& meaning) {
  EXPECT_TRUE(meaning["activation"] == "SiLUActivation" || meaning["activation"] == "SiLU");
  EXPECT_EQ(config.rms_norm_eps, static_cast<float>(meaning["rms_norm_eps"].get<double>()));
  const contract::RopeScaling scaling = RopeScalingOf(config);
  const std::vector<float> frequencies =
      contract::InverseFrequencies(config.head_dim, config.rope_theta, scaling);
  const auto expected = meaning["inverse_frequencies"].get<std::vector<double>>();
  ASSERT_EQ(frequencies.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(frequencies[i], expected[i], 4e-6 * expected[i]) << "pair " << i;
  }
  EXPECT_NEAR(contract::AttentionFactor(scaling), meaning["attention_scaling"].get<double>(),
              1e-12);
}

// isobit treats null like an absent field; transformers refuses null in some fields.
bool NullsAreAbsent(const Case& test, const ModelConfig& parsed) {
  const json patch = {{"without", test.Config()}};  // merge_patch drops members that are null
  json without;
  without.merge_patch(patch);
  if (without["without"] == test.Config()) return false;
  const auto alone = ParseModelConfig(without["without"].dump());
  return alone.ok() && alone->CanonicalString() == parsed.CanonicalString();
}

bool OnlyHarmless(const Case& test) {
  for (const auto& [name, value] : test.changes.items()) {
    if (!IsHarmlessField(name)) return false;
  }
  return !test.changes.empty();
}

// isobit's errors for configs that transformers accepts, and the reasons.
struct Refusal {
  const char* message;
  const char* reason;
};
constexpr Refusal kRefusals[] = {
    // Sizes: transformers' defaults are those of one model.
    {"num_key_value_heads is missing", "the default is a number of one model"},
    {"head_dim is missing", "likewise"},
    {"rms_norm_eps is missing", "likewise"},
    {"max_position_embeddings is missing", "it bounds requests"},
    {"max_position_embeddings is ", "likewise: below 1"},
    {"hidden_size is 0", "no model"},
    {"intermediate_size is 0", "no model"},
    {"rms_norm_eps is ", "outside [1e-12, 0.1]"},
    {"rope_theta is ", "below 1, or another one in rope_scaling"},
    {"rope_theta must be a number", "true is none"},
    {"head_dim is ", "odd"},
    {"head_dim must be an integer", "true is none"},
    // Fields that transformers ignores although they would matter.
    {"attention_bias is ", "Mistral has none"},
    {"\"attention_bias\" is not supported", "Qwen2 has its own"},
    {"mlp_bias is ", "only Llama may have it"},
    {"\"qkv_bias\" is not supported", "not a field of these architectures"},
    {"\"sliding_window\" is not supported", "Llama has none"},
    {"\"use_sliding_window\" is not supported", "only Qwen has it"},
    {"\"max_window_layers\" is not supported", "only Qwen has it"},
    {"but the sliding window in force is", "a list that no code follows"},
    {"sliding_window is 0, expected null", "an empty window, though no layer may slide"},
    {"sliding_window is -5", "likewise"},
    {"partial_rotary_factor is ", "transformers honours it in some types only"},
    {"rope_interleaved is ", "not a field of transformers"},
    {"use_mrope is ", "likewise"},
    {"\"attention_multiplier\" is not supported", "other architectures' scales"},
    {"\"logit_scale\" is not supported", "likewise"},
    {"\"logits_scaling\" is not supported", "likewise"},
    {"\"residual_multiplier\" is not supported", "likewise"},
    {"\"embedding_multiplier\" is not supported", "likewise"},
    {"\"attn_logit_softcapping\" is not supported", "likewise"},
    {"\"final_logit_softcapping\" is not supported", "likewise"},
    {"\"scale_embeddings\" is not supported", "likewise"},
    {"\"num_experts\" is not supported", "likewise"},
    {"\"original_max_position_embeddings\" is not supported", "outside the rotary object"},
    {"\"per_layer_config\" is not supported", "even if empty"},
    {"hidden_act is ", "isobit computes silu"},
    {"is_causal is ", "isobit is causal; transformers takes any true value, and null for false"},
    {"is_encoder_decoder is ", "isobit has no encoder"},
    // The rotary object.
    {"rope_type is \"dynamic\"", "not computed"},
    {"rope_scaling and rope_parameters are both given", "which one counts has changed"},
    {".type is ", "another than rope_type"},
    {"\"rope_scaling.", "a field that the type does not have"},
    {"\"rope_parameters.", "likewise"},
    {"original_max_position_embeddings must be an integer", "4096.0"},
    {"original_max_position_embeddings is 0", "llama3 divides by it"},
    {".factor is 0.5", "factors are at least 1"},
    {"attention_factor is 0", "no attention"},
    {"high_freq_factor is ", "no more than low_freq_factor"},
    {"low_freq_factor is ", "0"},
    {"beta_fast is ", "no more than beta_slow"},
};

bool IsListed(absl::string_view message) {
  return std::any_of(std::begin(kRefusals), std::end(kRefusals), [&](const Refusal& refusal) {
    return absl::StrContains(message, refusal.message);
  });
}

// What isobit accepts and transformers 5 refuses, apart from nulls and harmless fields.
bool IsTaken(const Case& test) {
  const bool mistral = test.base["architectures"][0] == "MistralForCausalLM";
  // No grouping, as for the other architectures.
  if (mistral && test.changes == json{{"num_key_value_heads", nullptr}}) return true;
  // A list that repeats what sliding_window says.
  return mistral && test.changes.contains("layer_types");
}

// The message must name one of the fields that the case changes.
bool NamesAField(const Case& test, absl::string_view message) {
  for (const auto& [name, value] : test.changes.items()) {
    if (absl::StrContains(message, name)) return true;
    if (absl::StartsWith(name, "rope_") && absl::StrContains(message, "rope_")) return true;
  }
  for (const auto& name : test.unset) {
    if (absl::StrContains(message, name.get<std::string>())) return true;
  }
  return false;
}

TEST(ConfigTest, MeansWhatTransformersMakesOfIt) {
  int equal = 0;
  int both_refuse = 0;
  int refused = 0;
  int taken = 0;
  for (const Case& test : ReadCases()) {
    SCOPED_TRACE(absl::StrCat(test.base["architectures"].dump(), " ", test.Text()));
    const auto config = ParseModelConfig(test.Config().dump());
    if (!config.ok()) {
      EXPECT_TRUE(NamesAField(test, config.status().message())) << config.status();
      if (test.meaning.is_null()) {
        ++both_refuse;
        continue;
      }
      ++refused;
      EXPECT_TRUE(IsListed(config.status().message()))
          << "transformers takes it: " << config.status();
      continue;
    }
    if (test.meaning.is_null()) {
      ++taken;
      EXPECT_TRUE(OnlyHarmless(test) || NullsAreAbsent(test, *config) || IsTaken(test))
          << "transformers: " << test.error;
      continue;
    }
    ++equal;
    const json meaning = MeaningOf(*config);
    for (const auto& [name, value] : meaning.items()) {
      EXPECT_EQ(value, test.meaning[name]) << name;
    }
    ExpectSameNumbers(*config, test.meaning);
  }
  std::printf(
      "configs: %d equal, %d refused by both, %d by isobit alone, %d by transformers alone\n",
      equal, both_refuse, refused, taken);
  EXPECT_GT(equal, 500);
}

}  // namespace
}  // namespace isobit
