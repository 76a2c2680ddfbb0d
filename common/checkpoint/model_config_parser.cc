// Reading of config.json. Each field is taken by name; what is left at the end and is not known to
// be harmless is an error.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <limits>
#include <set>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/mapped_file.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/model_directory.h"
#include "common/checkpoint/strict_json.h"

namespace isobit {
namespace {

using nlohmann::json;

constexpr size_t kMaxConfigBytes = 4 << 20;

// Fields of config.json that cannot change a logprob: training, caching, loading or export
// settings, and notes of tools.
constexpr const char* kHarmlessFields[] = {
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "initializer_range",
    "is_llama_config",
    "max_length",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
};

// Takes typed fields out of a JSON object. The first error sticks and later calls return their
// default, so that the code which takes the fields reads as a list of them. A null is an absent
// field.
class FieldReader {
 public:
  FieldReader(const json& object, std::string prefix)
      : object_(object), prefix_(std::move(prefix)) {}

  const absl::Status& status() const { return status_; }

  // Null when absent.
  const json* Take(const char* name) {
    taken_.insert(name);
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }

  int Int(const char* name) { return Required<int>(name, &FieldReader::IntOr); }
  double Double(const char* name) { return Required<double>(name, &FieldReader::DoubleOr); }

  int IntOr(const char* name, int fallback) {
    const json* value = Take(name);
    if (value == nullptr) return fallback;
    return ToInt(*value, name, fallback);
  }

  double DoubleOr(const char* name, double fallback) {
    const json* value = Take(name);
    if (value == nullptr) return fallback;
    if (!value->is_number()) return Mistyped(name, "a number", *value, fallback);
    return value->get<double>();
  }

  bool BoolOr(const char* name, bool fallback) {
    const json* value = Take(name);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) return Mistyped(name, "true or false", *value, fallback);
    return value->get<bool>();
  }

  std::string StringOr(const char* name, const std::string& fallback) {
    const json* value = Take(name);
    if (value == nullptr) return fallback;
    if (!value->is_string()) return Mistyped(name, "a string", *value, fallback);
    return value->get<std::string>();
  }

  // null, one integer or a list of integers.
  std::vector<int> IntsOrEmpty(const char* name) {
    std::vector<int> values;
    const json* value = Take(name);
    if (value == nullptr) return values;
    if (!value->is_array()) return {ToInt(*value, name, 0)};
    for (const json& element : *value) values.push_back(ToInt(element, name, 0));
    return values;
  }

  // The field may be present with this value only: the one that changes nothing.
  void RequireIfPresent(const char* name, const json& expected) {
    const json* value = Take(name);
    if (value != nullptr && *value != expected) {
      Fail(absl::StrCat(prefix_, name, " is ", Shown(*value), ", but only ", expected.dump(),
                        " is supported"));
    }
  }

  void Fail(const std::string& message) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(message);
  }

  // The first error, or one that names a field which nobody took.
  absl::Status Finish(const std::set<std::string>& harmless) {
    for (const auto& [name, value] : object_.items()) {
      if (value.is_null() || taken_.count(name) != 0 || harmless.count(name) != 0) continue;
      Fail(absl::StrCat("field ", Quoted(prefix_ + name), " is not supported (value ", Shown(value),
                        ")"));
    }
    return status_;
  }

 private:
  static std::string Shown(const json& value) {
    return Quoted(value.dump(-1, ' ', true, json::error_handler_t::replace));
  }

  template <class T>
  T Required(const char* name, T (FieldReader::*read)(const char*, T)) {
    if (Take(name) == nullptr) Fail(absl::StrCat("field ", prefix_, name, " is missing"));
    return (this->*read)(name, T{});
  }

  int ToInt(const json& value, const char* name, int fallback) {
    if (!value.is_number_integer()) return Mistyped(name, "an integer", value, fallback);
    const bool fits = value.is_number_unsigned()
                          ? value.get<uint64_t>() <= std::numeric_limits<int>::max()
                          : value.get<int64_t>() >= std::numeric_limits<int>::min();
    if (!fits) return Mistyped(name, "an integer of 32 bits", value, fallback);
    return value.get<int>();
  }

  template <class T>
  T Mistyped(const char* name, const char* expected, const json& value, T fallback) {
    Fail(absl::StrCat(prefix_, name, " must be ", expected, ", got ", Shown(value)));
    return fallback;
  }

  const json& object_;
  const std::string prefix_;
  std::set<std::string> taken_;
  absl::Status status_;
};

absl::StatusOr<Architecture> ParseArchitecture(FieldReader& reader) {
  const json* names = reader.Take("architectures");
  if (names == nullptr || !names->is_array() || names->size() != 1 || !(*names)[0].is_string()) {
    return absl::InvalidArgumentError("architectures must be an array of one name");
  }
  const std::string name = (*names)[0].get<std::string>();
  for (const auto& [architecture, model_type] :
       {std::pair{Architecture::kLlama, "llama"}, std::pair{Architecture::kMistral, "mistral"},
        std::pair{Architecture::kQwen2, "qwen2"}, std::pair{Architecture::kQwen3, "qwen3"}}) {
    if (name != ArchitectureName(architecture)) continue;
    reader.RequireIfPresent("model_type", model_type);
    return architecture;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("architectures names ", Quoted(name),
                   ", supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
                   "Qwen3ForCausalLM"));
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

// The inside of rope_scaling (transformers 4) or rope_parameters (5, which holds rope_theta too).
absl::Status ParseRopeObject(const json& object, const char* name, bool has_theta,
                             ModelConfig& config) {
  if (!object.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " must be an object"));
  }
  FieldReader reader(object, absl::StrCat(name, "."));
  RopeScaling& scaling = config.rope_scaling;
  const std::string old_type = reader.StringOr("type", "default");
  const std::string type = reader.StringOr("rope_type", old_type);
  reader.RequireIfPresent("type", type);
  reader.RequireIfPresent("partial_rotary_factor", 1.0);
  const double theta = reader.DoubleOr("rope_theta", config.rope_theta);
  if (has_theta && theta != config.rope_theta) {
    reader.Fail(
        absl::StrCat(name, ".rope_theta is ", theta, ", but rope_theta is ", config.rope_theta));
  }
  config.rope_theta = theta;
  if (type == "linear") {
    scaling.type = RopeType::kLinear;
    scaling.factor = reader.Double("factor");
  } else if (type == "llama3") {
    scaling.type = RopeType::kLlama3;
    scaling.factor = reader.Double("factor");
    scaling.low_freq_factor = reader.Double("low_freq_factor");
    scaling.high_freq_factor = reader.Double("high_freq_factor");
    scaling.original_max_position_embeddings =
        reader.IntOr("original_max_position_embeddings", config.max_position_embeddings);
  } else if (type != "default") {
    reader.Fail(
        absl::StrCat(name, ".rope_type is ", Quoted(type), ", supported: default, linear, llama3"));
  }
  return reader.Finish({});
}

absl::Status ParseRope(FieldReader& reader, ModelConfig& config) {
  const bool has_theta = reader.Take("rope_theta") != nullptr;
  config.rope_theta = reader.DoubleOr("rope_theta", config.rope_theta);
  const json* scaling = reader.Take("rope_scaling");
  const json* parameters = reader.Take("rope_parameters");
  if (scaling != nullptr && parameters != nullptr) {
    return absl::InvalidArgumentError("rope_scaling and rope_parameters are both given");
  }
  if (scaling != nullptr) return ParseRopeObject(*scaling, "rope_scaling", has_theta, config);
  if (parameters != nullptr) {
    return ParseRopeObject(*parameters, "rope_parameters", has_theta, config);
  }
  return absl::OkStatus();
}

// The width that applies to sliding layers, 0 when there are none, as transformers decides it.
int ParseWindow(FieldReader& reader, const json& object, Architecture architecture) {
  constexpr int kDefaultWindow = 4096;
  switch (architecture) {
    case Architecture::kLlama:
      return 0;
    case Architecture::kMistral:
      // Here null is a statement, no window, while an absent field means the default.
      return reader.IntOr("sliding_window", object.contains("sliding_window") ? 0 : kDefaultWindow);
    case Architecture::kQwen2:
    case Architecture::kQwen3: {
      const int window = reader.IntOr("sliding_window", kDefaultWindow);
      return reader.BoolOr("use_sliding_window", false) ? window : 0;
    }
  }
  return 0;
}

// Fills layer_windows. Needs a checked num_layers.
absl::Status ParseWindows(FieldReader& reader, const json& object, ModelConfig& config) {
  const int window = ParseWindow(reader, object, config.architecture);
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
  switch (config.architecture) {
    case Architecture::kLlama:
      config.qkv_bias = config.o_bias = reader.BoolOr("attention_bias", false);
      config.mlp_bias = reader.BoolOr("mlp_bias", false);
      reader.RequireIfPresent("pretraining_tp", 1);
      reader.RequireIfPresent("rope_interleaved", false);
      return;
    case Architecture::kMistral:
      reader.RequireIfPresent("attention_bias", false);
      return;
    case Architecture::kQwen2:
      config.qkv_bias = true;
      reader.RequireIfPresent("use_mrope", false);
      return;
    case Architecture::kQwen3:
      config.qkv_bias = config.o_bias = reader.BoolOr("attention_bias", false);
      config.qk_norm = true;
      return;
  }
}

absl::StatusOr<ModelConfig> ParseConfigObject(const json& object) {
  FieldReader reader(object, "");
  ModelConfig config;
  ISOBIT_ASSIGN_OR_RETURN(config.architecture, ParseArchitecture(reader));
  reader.RequireIfPresent("hidden_act", "silu");
  reader.RequireIfPresent("attention_dropout", 0.0);
  reader.RequireIfPresent("is_encoder_decoder", false);
  reader.RequireIfPresent("partial_rotary_factor", 1.0);
  config.vocab_size = reader.Int("vocab_size");
  config.hidden_size = reader.Int("hidden_size");
  config.intermediate_size = reader.Int("intermediate_size");
  config.num_layers = reader.Int("num_hidden_layers");
  config.num_heads = reader.Int("num_attention_heads");
  // transformers has other defaults for each architecture and version; only Llama's is a meaning
  // (no grouping), not a number.
  config.num_kv_heads = config.architecture == Architecture::kLlama
                            ? reader.IntOr("num_key_value_heads", config.num_heads)
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
  ISOBIT_RETURN_IF_ERROR(ParseRope(reader, config));
  ISOBIT_RETURN_IF_ERROR(ValidateModelConfig(config));  // num_layers sizes a vector next
  ISOBIT_RETURN_IF_ERROR(ParseWindows(reader, object, config));
  ISOBIT_RETURN_IF_ERROR(reader.Finish({std::begin(kHarmlessFields), std::end(kHarmlessFields)}));
  ISOBIT_RETURN_IF_ERROR(ValidateModelConfig(config));
  return config;
}

// generation_config.json wins over config.json, as in transformers' generate().
absl::Status ReadGenerationTokens(const std::string& text, ModelConfig& config) {
  ISOBIT_ASSIGN_OR_RETURN(const json object, ParseJsonObject(text, "generation_config.json"));
  FieldReader reader(object, "generation_config.json: ");
  const std::vector<int> eos = reader.IntsOrEmpty("eos_token_id");
  if (!eos.empty()) config.eos_token_ids = eos;
  config.bos_token_id = reader.IntOr("bos_token_id", config.bos_token_id);
  ISOBIT_RETURN_IF_ERROR(reader.status());
  return ValidateModelConfig(config);
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& config_json,
                                             const std::string& generation_config_json) {
  ISOBIT_ASSIGN_OR_RETURN(const json object, ParseJsonObject(config_json, "config.json"));
  absl::StatusOr<ModelConfig> config = ParseConfigObject(object);
  if (!config.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("config.json: ", config.status().message()));
  }
  if (!generation_config_json.empty()) {
    ISOBIT_RETURN_IF_ERROR(ReadGenerationTokens(generation_config_json, *config));
  }
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& directory, const std::string& root) {
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
  return ParseModelConfig(text, generation);
}

}  // namespace isobit
