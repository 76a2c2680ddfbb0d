// Validation, canonical form and writing of model configs; model_config_parser.cc reads them.
#include "common/checkpoint/model_config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/atomic_file.h"
#include "nlohmann/json.hpp"

namespace isobit {
namespace {

absl::Status CheckInt(const char* field, int value, int low, int high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, ", expected ", low, " to ", high));
}

// A NaN fails.
absl::Status CheckDouble(const char* field, double value, double low, double high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, ", expected ", low, " to ", high));
}

// For a field that is kept as a float: both bounds, rounded alike, are within.
absl::Status CheckFloat(const char* field, float value, float low, float high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %.9g, expected %g to %g", field, value, low, high));
}

absl::Status Require(bool condition, const std::string& message) {
  return condition ? absl::OkStatus() : absl::InvalidArgumentError(message);
}

absl::Status CheckLlama3(const RopeScaling& scaling) {
  ISOBIT_RETURN_IF_ERROR(
      CheckDouble("rope_scaling.low_freq_factor", scaling.low_freq_factor, 1e-6, 1e6));
  ISOBIT_RETURN_IF_ERROR(
      CheckDouble("rope_scaling.high_freq_factor", scaling.high_freq_factor, 1e-6, 1e6));
  return Require(scaling.high_freq_factor > scaling.low_freq_factor,
                 absl::StrCat("rope_scaling.high_freq_factor is ", scaling.high_freq_factor,
                              ", expected more than low_freq_factor, ", scaling.low_freq_factor));
}

// theta 1 would give every pair the same frequency, which no ramp divides.
absl::Status CheckYarn(const RopeScaling& scaling, double theta) {
  ISOBIT_RETURN_IF_ERROR(CheckDouble("rope_theta", theta, 1.001, 1e12));
  ISOBIT_RETURN_IF_ERROR(CheckDouble("rope_scaling.beta_slow", scaling.beta_slow, 1e-6, 1e6));
  ISOBIT_RETURN_IF_ERROR(CheckDouble("rope_scaling.beta_fast", scaling.beta_fast, 1e-6, 1e6));
  ISOBIT_RETURN_IF_ERROR(CheckDouble("rope_scaling.mscale", scaling.mscale, 0, 1e3));
  ISOBIT_RETURN_IF_ERROR(
      CheckDouble("rope_scaling.mscale_all_dim", scaling.mscale_all_dim, 0, 1e3));
  if (scaling.attention_factor != 0) {  // as stated
    ISOBIT_RETURN_IF_ERROR(
        CheckDouble("rope_scaling.attention_factor", scaling.attention_factor, 1e-3, 1e3));
  }
  return Require(scaling.beta_fast > scaling.beta_slow,
                 absl::StrCat("rope_scaling.beta_fast is ", scaling.beta_fast,
                              ", expected more than beta_slow, ", scaling.beta_slow));
}

absl::Status CheckRope(const ModelConfig& config) {
  const RopeScaling& scaling = config.rope_scaling;
  ISOBIT_RETURN_IF_ERROR(CheckDouble("rope_theta", config.rope_theta, 1, 1e12));
  if (scaling.type == RopeType::kDefault) return absl::OkStatus();
  ISOBIT_RETURN_IF_ERROR(CheckDouble("rope_scaling.factor", scaling.factor, 1, 1e6));
  if (scaling.type == RopeType::kLinear) return absl::OkStatus();
  ISOBIT_RETURN_IF_ERROR(CheckInt("rope_scaling.original_max_position_embeddings",
                                  scaling.original_max_position_embeddings, 1, kMaxPositions));
  return scaling.type == RopeType::kYarn ? CheckYarn(scaling, config.rope_theta)
                                         : CheckLlama3(scaling);
}

absl::Status CheckWindows(const ModelConfig& config) {
  if (config.layer_windows.empty()) return absl::OkStatus();
  ISOBIT_RETURN_IF_ERROR(
      Require(static_cast<int>(config.layer_windows.size()) == config.num_layers,
              absl::StrCat("layer_types has ", config.layer_windows.size(),
                           " entries, expected num_hidden_layers, ", config.num_layers)));
  int shared = 0;
  for (const int window : config.layer_windows) {
    ISOBIT_RETURN_IF_ERROR(CheckInt("sliding_window", window, 0, kMaxPositions));
    if (window != 0 && shared == 0) shared = window;
    ISOBIT_RETURN_IF_ERROR(Require(window == 0 || window == shared,
                                   absl::StrCat("sliding_window is ", shared, " in one layer and ",
                                                window, " in another, expected one width")));
  }
  return absl::OkStatus();
}

absl::Status CheckTokenIds(const ModelConfig& config) {
  constexpr size_t kMaxEosIds = 64;
  if (config.eos_token_ids.size() > kMaxEosIds) {
    return absl::InvalidArgumentError(absl::StrCat("eos_token_id has ", config.eos_token_ids.size(),
                                                   " ids, expected at most ", kMaxEosIds));
  }
  for (const int id : config.eos_token_ids) {
    ISOBIT_RETURN_IF_ERROR(CheckInt("eos_token_id", id, 0, config.vocab_size - 1));
  }
  return CheckInt("bos_token_id", config.bos_token_id, -1, config.vocab_size - 1);
}

// What the modules of each architecture in transformers have, whatever config.json says.
absl::Status CheckArchitecture(const ModelConfig& config) {
  const char* name = ArchitectureName(config.architecture);
  const bool llama = config.architecture == Architecture::kLlama;
  const bool mistral = config.architecture == Architecture::kMistral;
  const bool qwen2 = config.architecture == Architecture::kQwen2;
  const bool qwen3 = config.architecture == Architecture::kQwen3;
  ISOBIT_RETURN_IF_ERROR(Require(
      config.qk_norm == qwen3, absl::StrCat(name, ": qk_norm must be ", qwen3 ? "true" : "false")));
  ISOBIT_RETURN_IF_ERROR(
      Require(llama || !config.mlp_bias, absl::StrCat(name, ": mlp_bias must be false")));
  ISOBIT_RETURN_IF_ERROR(
      Require(qwen2 ? config.qkv_bias && !config.o_bias : config.qkv_bias == config.o_bias,
              absl::StrCat(name, qwen2 ? ": q, k and v have biases and o none"
                                       : ": q, k, v and o share attention_bias")));
  ISOBIT_RETURN_IF_ERROR(
      Require(!mistral || !config.qkv_bias, absl::StrCat(name, ": attention_bias must be false")));
  ISOBIT_RETURN_IF_ERROR(Require(!llama || config.layer_windows.empty(),
                                 absl::StrCat(name, ": has no sliding_window")));
  const bool mixed = std::adjacent_find(config.layer_windows.begin(), config.layer_windows.end(),
                                        std::not_equal_to<>()) != config.layer_windows.end();
  return Require(!mistral || !mixed,
                 absl::StrCat(name, ": sliding_window must be the same in every layer"));
}

// The double whose shortest decimal form is that of the float, so that 1e-6f is written as 1e-06.
double ShortestDouble(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  double result = 0;
  std::from_chars(text, end, result);
  return result;
}

const char* TorchDTypeName(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF32:
      return "float32";
  }
  ISOBIT_CHECK(false) << "dtype " << static_cast<int>(dtype);
  return nullptr;
}

nlohmann::ordered_json YarnJson(const RopeScaling& scaling) {
  nlohmann::ordered_json json = {
      {"rope_type", "yarn"},
      {"factor", scaling.factor},
      {"original_max_position_embeddings", scaling.original_max_position_embeddings},
      {"beta_fast", scaling.beta_fast},
      {"beta_slow", scaling.beta_slow},
      {"truncate", scaling.truncate}};
  if (scaling.attention_factor != 0) json["attention_factor"] = scaling.attention_factor;
  if (scaling.mscale != 0) {
    json["mscale"] = scaling.mscale;
    json["mscale_all_dim"] = scaling.mscale_all_dim;
  }
  return json;
}

nlohmann::ordered_json RopeScalingJson(const RopeScaling& scaling) {
  switch (scaling.type) {
    case RopeType::kDefault:
      return nullptr;
    case RopeType::kLinear:
      return {{"rope_type", "linear"}, {"factor", scaling.factor}};
    case RopeType::kLlama3:
      return {{"rope_type", "llama3"},
              {"factor", scaling.factor},
              {"low_freq_factor", scaling.low_freq_factor},
              {"high_freq_factor", scaling.high_freq_factor},
              {"original_max_position_embeddings", scaling.original_max_position_embeddings}};
    case RopeType::kYarn:
      return YarnJson(scaling);
  }
  ISOBIT_CHECK(false) << "rope type " << static_cast<int>(scaling.type);
  return nullptr;
}

// The fields that only some architectures know.
void AddArchitectureFields(const ModelConfig& config, nlohmann::ordered_json& json) {
  const bool qwen =
      config.architecture == Architecture::kQwen2 || config.architecture == Architecture::kQwen3;
  if (config.architecture == Architecture::kLlama || config.architecture == Architecture::kQwen3) {
    json["attention_bias"] = config.qkv_bias;
  }
  if (config.architecture == Architecture::kLlama) json["mlp_bias"] = config.mlp_bias;
  if (config.architecture == Architecture::kLlama) return;

  const int window = config.layer_windows.empty() ? 0
                                                  : *std::max_element(config.layer_windows.begin(),
                                                                      config.layer_windows.end());
  json["sliding_window"] = window == 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(window);
  if (!qwen) return;
  json["use_sliding_window"] = window != 0;
  if (window == 0) return;
  json["layer_types"] = nlohmann::ordered_json::array();
  for (const int layer_window : config.layer_windows) {
    json["layer_types"].push_back(layer_window == 0 ? "full_attention" : "sliding_attention");
  }
}

nlohmann::ordered_json ConfigJson(const ModelConfig& config) {
  nlohmann::ordered_json json = {
      {"architectures", nlohmann::ordered_json::array({ArchitectureName(config.architecture)})}};
  json["model_type"] = ModelTypeName(config.architecture);
  json["vocab_size"] = config.vocab_size;
  json["hidden_size"] = config.hidden_size;
  json["intermediate_size"] = config.intermediate_size;
  json["num_hidden_layers"] = config.num_layers;
  json["num_attention_heads"] = config.num_heads;
  json["num_key_value_heads"] = config.num_kv_heads;
  json["head_dim"] = config.head_dim;
  json["hidden_act"] = "silu";
  json["rms_norm_eps"] = ShortestDouble(config.rms_norm_eps);
  json["rope_theta"] = config.rope_theta;
  json["rope_scaling"] = RopeScalingJson(config.rope_scaling);
  json["max_position_embeddings"] = config.max_position_embeddings;
  json["tie_word_embeddings"] = config.tie_word_embeddings;
  AddArchitectureFields(config, json);
  json["torch_dtype"] = TorchDTypeName(config.torch_dtype);
  return json;
}

// null, one id or a list: the three forms that transformers knows.
nlohmann::ordered_json TokenIdsJson(const std::vector<int>& ids) {
  if (ids.empty()) return nullptr;
  return ids.size() == 1 ? nlohmann::ordered_json(ids[0]) : nlohmann::ordered_json(ids);
}

}  // namespace

const char* ArchitectureName(Architecture architecture) {
  switch (architecture) {
    case Architecture::kLlama:
      return "LlamaForCausalLM";
    case Architecture::kMistral:
      return "MistralForCausalLM";
    case Architecture::kQwen2:
      return "Qwen2ForCausalLM";
    case Architecture::kQwen3:
      return "Qwen3ForCausalLM";
  }
  ISOBIT_CHECK(false) << "architecture " << static_cast<int>(architecture);
  return nullptr;
}

const char* ModelTypeName(Architecture architecture) {
  switch (architecture) {
    case Architecture::kLlama:
      return "llama";
    case Architecture::kMistral:
      return "mistral";
    case Architecture::kQwen2:
      return "qwen2";
    case Architecture::kQwen3:
      return "qwen3";
  }
  ISOBIT_CHECK(false) << "architecture " << static_cast<int>(architecture);
  return nullptr;
}

absl::Status ValidateModelConfig(const ModelConfig& config) {
  ISOBIT_RETURN_IF_ERROR(CheckInt("vocab_size", config.vocab_size, 1, 1 << 22));
  ISOBIT_RETURN_IF_ERROR(CheckInt("hidden_size", config.hidden_size, 1, 1 << 16));
  ISOBIT_RETURN_IF_ERROR(CheckInt("intermediate_size", config.intermediate_size, 1, 1 << 20));
  ISOBIT_RETURN_IF_ERROR(CheckInt("num_hidden_layers", config.num_layers, 1, 1024));
  ISOBIT_RETURN_IF_ERROR(CheckInt("num_attention_heads", config.num_heads, 1, 1024));
  ISOBIT_RETURN_IF_ERROR(CheckInt("num_key_value_heads", config.num_kv_heads, 1, 1024));
  ISOBIT_RETURN_IF_ERROR(
      Require(config.num_heads % config.num_kv_heads == 0,
              absl::StrCat("num_attention_heads is ", config.num_heads,
                           ", expected a multiple of num_key_value_heads, ", config.num_kv_heads)));
  ISOBIT_RETURN_IF_ERROR(CheckInt("head_dim", config.head_dim, 2, 256));
  ISOBIT_RETURN_IF_ERROR(
      Require(config.head_dim % 2 == 0,
              absl::StrCat("head_dim is ", config.head_dim, ", expected an even number")));
  ISOBIT_RETURN_IF_ERROR(CheckFloat("rms_norm_eps", config.rms_norm_eps, 1e-12F, 1e-1F));
  ISOBIT_RETURN_IF_ERROR(
      CheckInt("max_position_embeddings", config.max_position_embeddings, 1, kMaxPositions));
  ISOBIT_RETURN_IF_ERROR(CheckRope(config));
  ISOBIT_RETURN_IF_ERROR(CheckWindows(config));
  ISOBIT_RETURN_IF_ERROR(CheckTokenIds(config));
  return CheckArchitecture(config);
}

std::string ModelConfig::CanonicalString() const {
  std::string text = absl::StrFormat(
      "vocab_size=%d\nhidden_size=%d\nintermediate_size=%d\nnum_layers=%d\nnum_heads=%d\n"
      "num_kv_heads=%d\nhead_dim=%d\nrms_norm_eps=%a\nrope_theta=%a\n",
      vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim,
      rms_norm_eps, rope_theta);
  switch (rope_scaling.type) {
    case RopeType::kDefault:
      absl::StrAppend(&text, "rope=default\n");
      break;
    case RopeType::kLinear:
      absl::StrAppendFormat(&text, "rope=linear %a\n", rope_scaling.factor);
      break;
    case RopeType::kLlama3:
      absl::StrAppendFormat(&text, "rope=llama3 %a %a %a %d\n", rope_scaling.factor,
                            rope_scaling.low_freq_factor, rope_scaling.high_freq_factor,
                            rope_scaling.original_max_position_embeddings);
      break;
    case RopeType::kYarn:
      absl::StrAppendFormat(&text, "rope=yarn %a %d %a %a %d %a %a %a\n", rope_scaling.factor,
                            rope_scaling.original_max_position_embeddings, rope_scaling.beta_fast,
                            rope_scaling.beta_slow, rope_scaling.truncate,
                            rope_scaling.attention_factor, rope_scaling.mscale,
                            rope_scaling.mscale_all_dim);
      break;
  }
  absl::StrAppendFormat(&text, "tied=%d\nqkv_bias=%d\no_bias=%d\nmlp_bias=%d\nqk_norm=%d\n",
                        tie_word_embeddings, qkv_bias, o_bias, mlp_bias, qk_norm);
  std::vector<int> windows;
  for (int layer = 0; layer < num_layers; ++layer) windows.push_back(WindowOfLayer(layer));
  absl::StrAppend(&text, "windows=", absl::StrJoin(windows, ","), "\n");
  return text;
}

std::string ModelConfig::Settings() const {
  const std::set<int> ids(eos_token_ids.begin(), eos_token_ids.end());
  return absl::StrCat("eos_token_ids=", ids.empty() ? "none" : absl::StrJoin(ids, ","),
                      " max_position_embeddings=", max_position_embeddings);
}

absl::Status WriteConfigJson(const ModelConfig& config, const std::string& directory) {
  ISOBIT_RETURN_IF_ERROR(ValidateModelConfig(config));
  nlohmann::ordered_json generation = {{"_from_model_config", true}};
  generation["eos_token_id"] = TokenIdsJson(config.eos_token_ids);
  if (config.bos_token_id >= 0) generation["bos_token_id"] = config.bos_token_id;
  nlohmann::ordered_json json = ConfigJson(config);
  json["eos_token_id"] = TokenIdsJson(config.eos_token_ids);
  json["bos_token_id"] = config.bos_token_id < 0 ? nlohmann::ordered_json()
                                                 : nlohmann::ordered_json(config.bos_token_id);
  const std::filesystem::path path(directory);
  ISOBIT_RETURN_IF_ERROR(
      WriteFileAtomically((path / "generation_config.json").string(), {generation.dump(2) + "\n"}));
  return WriteFileAtomically((path / "config.json").string(), {json.dump(2) + "\n"});
}

}  // namespace isobit
