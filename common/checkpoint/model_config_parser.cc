// Reading of config.json. Each field is taken by name; a field that is left at the end and not
// known to be harmless is an error.
#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/config_fields.h"
#include "common/checkpoint/field_reader.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/model_directory.h"
#include "common/checkpoint/readable_file.h"
#include "common/checkpoint/rope_parser.h"
#include "common/checkpoint/strict_json.h"
#include "common/checkpoint/supported_models.h"

namespace isobit {
namespace {

using nlohmann::json;

constexpr size_t kMaxConfigBytes = 4 << 20;

absl::StatusOr<Architecture> ParseArchitecture(FieldReader& reader) {
  const json* names = reader.Take("architectures");
  if (names == nullptr || !names->is_array() || names->size() != 1 || !(*names)[0].is_string()) {
    return absl::InvalidArgumentError("architectures must be an array of one name");
  }
  const std::string name = (*names)[0].get<std::string>();
  for (const Architecture architecture :
       {Architecture::kLlama, Architecture::kMistral, Architecture::kQwen2, Architecture::kQwen3}) {
    if (name != ArchitectureName(architecture)) continue;
    reader.RequireIfPresent("model_type", {ModelTypeName(architecture)});
    return architecture;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("architectures names ", Quoted(name), DescribeUnsupported(name)));
}

DType ParseTorchDType(FieldReader& reader) {
  const std::string old_name = reader.StringOr("torch_dtype", "");
  const std::string name = reader.StringOr("dtype", old_name);
  if (!old_name.empty() && name != old_name) {
    reader.Fail(absl::StrCat("dtype is ", Quoted(name), ", but torch_dtype is ", Quoted(old_name)));
  }
  if (name == "bfloat16") return DType::kBf16;
  if (name == "float16") return DType::kF16;
  if (name != "" && name != "float32") {
    reader.Fail(
        absl::StrCat("torch_dtype is ", Quoted(name), ", expected bfloat16, float16 or float32"));
  }
  return DType::kF32;
}

// Returns the width of the sliding window, or 0 if there is none, by the rules of transformers:
// null means no window, and an absent field means the default. A stated width of 0 is an error, as
// a token would not see even itself.
int ParseWindow(FieldReader& reader, Architecture architecture) {
  constexpr int kDefaultWindow = 4096;
  if (architecture == Architecture::kLlama) return 0;
  const bool absent = !reader.Has("sliding_window");
  const bool states_width = reader.Take("sliding_window") != nullptr;
  const int window = reader.IntOr("sliding_window", absent ? kDefaultWindow : 0);
  const bool in_force =
      architecture == Architecture::kMistral || reader.BoolOr("use_sliding_window", false);
  if (in_force && states_width && window == 0) {
    reader.Fail("sliding_window is 0, expected null, for none, or 1 or more");
  }
  return in_force ? window : 0;
}

// Fills layer_windows. Needs a checked num_layers.
absl::Status ParseWindows(FieldReader& reader, ModelConfig& config) {
  const int window = ParseWindow(reader, config.architecture);
  const bool qwen =
      config.architecture == Architecture::kQwen2 || config.architecture == Architecture::kQwen3;
  const int first_sliding = qwen ? reader.IntOr("max_window_layers", 28) : 0;
  std::vector<int> windows(static_cast<size_t>(config.num_layers), 0);
  for (int i = std::max(first_sliding, 0); i < config.num_layers; ++i) windows[i] = window;

  if (const json* types = reader.Take("layer_types")) {
    if (!types->is_array() || types->size() != windows.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layer_types must be an array of num_hidden_layers, ", windows.size(), ", names"));
    }
    for (size_t i = 0; i < windows.size(); ++i) {
      const json& type = (*types)[i];
      if (type != "full_attention" && type != "sliding_attention") {
        return absl::InvalidArgumentError(
            absl::StrCat("layer_types[", i, "] is ", Quoted(type.dump().substr(0, 100)),
                         ", expected full_attention or sliding_attention"));
      }
      const bool slides = type == "sliding_attention";
      // Only Qwen's code chooses by layer; elsewhere the list may at most repeat what
      // sliding_window says.
      if (slides ? window == 0 : !qwen && window != 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("layer_types[", i, "] is ", type.get<std::string>(),
                         ", but the sliding window in force is ", window, " (0: none)"));
      }
      windows[i] = slides ? window : 0;
    }
  }
  if (std::any_of(windows.begin(), windows.end(), [](int w) { return w != 0; })) {
    config.layer_windows = std::move(windows);
  }
  return absl::OkStatus();
}

void ParseBiases(FieldReader& reader, ModelConfig& config) {
  if (config.architecture != Architecture::kLlama) reader.RequireIfPresent("mlp_bias", {false});
  switch (config.architecture) {
    case Architecture::kLlama:
      config.qkv_bias = config.o_bias = reader.BoolOr("attention_bias", false);
      config.mlp_bias = reader.BoolOr("mlp_bias", false);
      return;
    case Architecture::kMistral:
      reader.RequireIfPresent("attention_bias", {false});
      return;
    case Architecture::kQwen2:
      config.qkv_bias = true;
      return;
    case Architecture::kQwen3:
      config.qkv_bias = config.o_bias = reader.BoolOr("attention_bias", false);
      config.qk_norm = true;
      return;
  }
}

// Whoever reads a log or GetServerInfo sees what the directory recommends and nobody applies.
void NameGenerationFields(const json& object, absl::string_view file, ModelConfig& config) {
  // Of generation_config.json alone, and without a part in the tokens, or applied.
  static const std::set<std::string> kInert = {"_from_model_config", "bos_token_id",
                                               "cache_implementation", "eos_token_id",
                                               "output_logits"};
  for (const auto& [name, value] : object.items()) {
    const bool is_named =
        IsGenerationField(name) ||
        (file != "config.json" && !IsHarmlessField(name) && !kInert.contains(name));
    if (value.is_null() || !is_named) continue;
    config.generation_fields.push_back(
        absl::StrCat(file, ": ", Quoted(name), " (value ", Quoted(value.dump()), ")"));
  }
}

absl::Status CheckPolicy(const LoadPolicy& policy) {
  for (const std::string& name : policy.ignored_fields) {
    if (!IsNeverIgnoredField(name)) continue;
    return absl::InvalidArgumentError(absl::StrCat("--ignore_config_fields names ", name,
                                                   ", without which it would be another model"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelConfig> ParseConfigObject(const json& object, const LoadPolicy& policy) {
  ISOBIT_RETURN_IF_ERROR(CheckPolicy(policy));
  FieldReader reader(object, "", policy.ignored_fields);
  ModelConfig config;
  ISOBIT_ASSIGN_OR_RETURN(config.architecture, ParseArchitecture(reader));
  reader.RequireIfPresent("hidden_act", {"silu", "swish"});  // two names of one function
  reader.RequireIfPresent("is_causal", {true});
  if (reader.Has("is_causal") && reader.Take("is_causal") == nullptr) {
    reader.Fail(
        "is_causal is null, which transformers takes for false, but only true is supported");
  }
  reader.RequireIfPresent("is_encoder_decoder", {false});
  reader.RequireIfPresent("partial_rotary_factor", {1.0});
  reader.RequireIfPresent("rope_interleaved", {false});
  reader.RequireIfPresent("use_mrope", {false});
  config.vocab_size = reader.Int("vocab_size");
  config.hidden_size = reader.Int("hidden_size");
  config.intermediate_size = reader.Int("intermediate_size");
  config.num_layers = reader.Int("num_hidden_layers");
  config.num_heads = reader.Int("num_attention_heads");
  // Null means that each query head has its own KV head. If the field is absent, transformers'
  // default depends on architecture and version; only Llama's default means the same as null, the
  // others are numbers.
  const bool may_group_none =
      config.architecture == Architecture::kLlama || reader.Has("num_key_value_heads");
  config.num_kv_heads = may_group_none ? reader.IntOr("num_key_value_heads", config.num_heads)
                                       : reader.Int("num_key_value_heads");
  const int derived_head_dim = config.num_heads > 0 ? config.hidden_size / config.num_heads : 0;
  config.head_dim = config.architecture == Architecture::kQwen3
                        ? reader.Int("head_dim")
                        : reader.IntOr("head_dim", derived_head_dim);
  config.rms_norm_eps = static_cast<float>(reader.Double("rms_norm_eps"));
  config.max_position_embeddings = reader.Int("max_position_embeddings");
  config.tie_word_embeddings = reader.BoolOr("tie_word_embeddings", false);
  config.eos_token_ids = reader.IntsOrEmpty("eos_token_id");
  config.bos_token_id = reader.IntOr("bos_token_id", -1);
  config.torch_dtype = ParseTorchDType(reader);
  ParseBiases(reader, config);
  ISOBIT_RETURN_IF_ERROR(reader.status());
  ISOBIT_RETURN_IF_ERROR(ParseRope(reader, policy, config));
  ISOBIT_RETURN_IF_ERROR(ValidateModelConfig(config));  // num_layers sizes a vector next
  ISOBIT_RETURN_IF_ERROR(ParseWindows(reader, config));
  ISOBIT_RETURN_IF_ERROR(reader.Finish(config.ignored_fields));
  ISOBIT_RETURN_IF_ERROR(ValidateModelConfig(config));
  NameGenerationFields(object, "config.json", config);
  return config;
}

// generation_config.json wins over config.json, as in transformers' generate().
absl::Status ReadGenerationTokens(const std::string& text, ModelConfig& config) {
  ISOBIT_ASSIGN_OR_RETURN(const json object, ParseJsonObject(text, "generation_config.json"));
  FieldReader reader(object, "generation_config.json: ", {});
  const std::vector<int> eos = reader.IntsOrEmpty("eos_token_id");
  if (!eos.empty()) config.eos_token_ids = eos;
  config.bos_token_id = reader.IntOr("bos_token_id", config.bos_token_id);
  ISOBIT_RETURN_IF_ERROR(reader.status());
  NameGenerationFields(object, "generation_config.json", config);
  return ValidateModelConfig(config);
}

// A loader that knows adapters would add it to the base, whose weights alone are another model.
absl::Status CheckNoAdapter(const std::string& directory) {
  for (const char* const name :
       {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}) {
    std::error_code error;
    const std::filesystem::path path = std::filesystem::path(directory) / name;
    if (!std::filesystem::exists(std::filesystem::symlink_status(path, error))) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(directory, " has ", name,
                     ": isobit applies no adapters, expected weights into which it is merged"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& config_json,
                                             const std::string& generation_config_json,
                                             const LoadPolicy& policy) {
  ISOBIT_ASSIGN_OR_RETURN(const json object, ParseJsonObject(config_json, "config.json"));
  absl::StatusOr<ModelConfig> config = ParseConfigObject(object, policy);
  if (!config.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("config.json: ", config.status().message()));
  }
  if (!generation_config_json.empty()) {
    ISOBIT_RETURN_IF_ERROR(ReadGenerationTokens(generation_config_json, *config));
  }
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& directory, const std::string& root,
                                            const LoadPolicy& policy) {
  ISOBIT_RETURN_IF_ERROR(CheckNoAdapter(directory));
  ISOBIT_ASSIGN_OR_RETURN(const std::string path,
                          ResolveFileInside(directory, "config.json", root));
  ISOBIT_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxConfigBytes));
  std::string generation;
  std::error_code ignored;
  if (std::filesystem::exists(std::filesystem::path(directory) / "generation_config.json",
                              ignored)) {
    ISOBIT_ASSIGN_OR_RETURN(const std::string generation_path,
                            ResolveFileInside(directory, "generation_config.json", root));
    ISOBIT_ASSIGN_OR_RETURN(generation, ReadTextFile(generation_path, kMaxConfigBytes));
  }
  return ParseModelConfig(text, generation, policy);
}

}  // namespace isobit
