// The table of named shapes. See model_shapes.h.
#include "tools/model_shapes.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace isobit {
namespace {

// The fields that the tiny models have in common.
ModelConfig Tiny(Architecture architecture, int hidden_size) {
  ModelConfig config;
  config.architecture = architecture;
  config.vocab_size = 499;
  config.hidden_size = hidden_size;
  config.intermediate_size = 173;
  config.num_layers = 3;
  config.num_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 16;
  config.rms_norm_eps = 1e-6f;
  config.max_position_embeddings = 2048;
  config.eos_token_ids = {1};
  config.bos_token_id = 0;
  return config;
}

ModelConfig TinyQwen3() {
  ModelConfig config = Tiny(Architecture::kQwen3, 91);
  config.qk_norm = true;
  config.rope_theta = 1e6;
  config.tie_word_embeddings = true;
  return config;
}

ModelConfig TinyQwen2() {
  ModelConfig config = Tiny(Architecture::kQwen2, 93);
  config.qkv_bias = true;
  config.rope_theta = 1e6;
  return config;
}

// transformers requires a Llama's hidden_size to be a multiple of its number of heads.
ModelConfig TinyLlama() {
  ModelConfig config = Tiny(Architecture::kLlama, 99);
  config.rope_theta = 5e5;
  config.rope_scaling = {.type = RopeType::kLlama3,
                         .factor = 8,
                         .low_freq_factor = 1,
                         .high_freq_factor = 4,
                         .original_max_position_embeddings = 256};
  return config;
}

ModelConfig TinyMistral() {
  ModelConfig config = Tiny(Architecture::kMistral, 95);
  config.num_layers = 2;
  config.layer_windows = {24, 24};
  return config;
}

// Yarn keeps one of its eight frequencies, blends one and divides six. Sequences may be as long as
// the stretched context.
ModelConfig TinyYarn() {
  ModelConfig config = TinyQwen3();
  config.rope_scaling = {
      .type = RopeType::kYarn, .factor = 4, .original_max_position_embeddings = 64};
  config.max_position_embeddings = 256;
  return config;
}

ModelConfig TinyWindows() {
  ModelConfig config = TinyQwen2();
  config.layer_windows = {24, 0, 24};
  return config;
}

ModelConfig SmolLm2() {
  ModelConfig config;
  config.architecture = Architecture::kLlama;
  config.vocab_size = 49152;
  config.hidden_size = 576;
  config.intermediate_size = 1536;
  config.num_layers = 30;
  config.num_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 64;
  config.rms_norm_eps = 1e-5f;
  config.rope_theta = 1e5;
  config.max_position_embeddings = 8192;
  config.tie_word_embeddings = true;
  config.eos_token_ids = {2};
  config.bos_token_id = 1;
  return config;
}

ModelConfig Qwen25Half() {
  ModelConfig config;
  config.architecture = Architecture::kQwen2;
  config.vocab_size = 151936;
  config.hidden_size = 896;
  config.intermediate_size = 4864;
  config.num_layers = 24;
  config.num_heads = 14;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.rms_norm_eps = 1e-6f;
  config.rope_theta = 1e6;
  config.max_position_embeddings = 32768;
  config.tie_word_embeddings = true;
  config.qkv_bias = true;
  config.eos_token_ids = {151645, 151643};
  config.bos_token_id = 151643;
  return config;
}

ModelConfig Qwen3(int hidden_size, int intermediate_size, int num_layers, int num_heads,
                  bool tie_word_embeddings) {
  ModelConfig config;
  config.architecture = Architecture::kQwen3;
  config.vocab_size = 151936;
  config.hidden_size = hidden_size;
  config.intermediate_size = intermediate_size;
  config.num_layers = num_layers;
  config.num_heads = num_heads;
  config.num_kv_heads = 8;
  config.head_dim = 128;
  config.rms_norm_eps = 1e-6f;
  config.rope_theta = 1e6;
  config.max_position_embeddings = 40960;
  config.tie_word_embeddings = tie_word_embeddings;
  config.qk_norm = true;
  config.eos_token_ids = {151645, 151643};
  config.bos_token_id = 151643;
  return config;
}

ModelConfig Llama3(int hidden_size, int intermediate_size, int num_layers, int head_dim,
                   double rope_factor, bool tie_word_embeddings) {
  ModelConfig config;
  config.architecture = Architecture::kLlama;
  config.vocab_size = 128256;
  config.hidden_size = hidden_size;
  config.intermediate_size = intermediate_size;
  config.num_layers = num_layers;
  config.num_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim = head_dim;
  config.rms_norm_eps = 1e-5f;
  config.rope_theta = 5e5;
  config.rope_scaling = {.type = RopeType::kLlama3,
                         .factor = rope_factor,
                         .low_freq_factor = 1,
                         .high_freq_factor = 4,
                         .original_max_position_embeddings = 8192};
  config.max_position_embeddings = 131072;
  config.tie_word_embeddings = tie_word_embeddings;
  config.eos_token_ids = {128001, 128008, 128009};
  config.bos_token_id = 128000;
  return config;
}

ModelConfig Mistral7B() {
  ModelConfig config;
  config.architecture = Architecture::kMistral;
  config.vocab_size = 32000;
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.num_layers = 32;
  config.num_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim = 128;
  config.rms_norm_eps = 1e-5f;
  config.max_position_embeddings = 32768;
  config.layer_windows.assign(32, 4096);
  config.eos_token_ids = {2};
  config.bos_token_id = 1;
  return config;
}

std::map<std::string, ModelConfig> AllShapes() {
  return {{"tiny-qwen3", TinyQwen3()},
          {"tiny-qwen2", TinyQwen2()},
          {"tiny-llama", TinyLlama()},
          {"tiny-mistral", TinyMistral()},
          {"tiny-yarn", TinyYarn()},
          {"tiny-windows", TinyWindows()},
          {"smollm2-135m", SmolLm2()},
          {"qwen2.5-0.5b", Qwen25Half()},
          {"qwen3-0.6b", Qwen3(1024, 3072, 28, 16, true)},
          {"qwen3-4b", Qwen3(2560, 9728, 36, 32, true)},
          {"qwen3-8b", Qwen3(4096, 12288, 36, 32, false)},
          {"qwen3-32b", Qwen3(5120, 25600, 64, 64, false)},
          {"llama-3.2-1b", Llama3(2048, 8192, 16, 64, 32, true)},
          {"llama-3.1-8b", Llama3(4096, 14336, 32, 128, 8, false)},
          {"mistral-7b", Mistral7B()}};
}

}  // namespace

absl::StatusOr<ModelConfig> NamedModelShape(const std::string& name) {
  const std::map<std::string, ModelConfig> shapes = AllShapes();
  const auto it = shapes.find(name);
  if (it != shapes.end()) return it->second;
  return absl::NotFoundError(absl::StrCat("model shape \"", name, "\": expected one of ",
                                          absl::StrJoin(ModelShapeNames(), ", ")));
}

std::vector<std::string> ModelShapeNames() {
  std::vector<std::string> names;
  for (const auto& [name, config] : AllShapes()) names.push_back(name);
  return names;
}

}  // namespace isobit
