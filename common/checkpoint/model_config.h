// The shape of a decoder as config.json gives it. A field that isobit does not apply is never
// skipped: it is an error that names the field.
#ifndef ISOBIT_COMMON_CHECKPOINT_MODEL_CONFIG_H_
#define ISOBIT_COMMON_CHECKPOINT_MODEL_CONFIG_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/dtype.h"
#include "common/checkpoint/load_policy.h"

namespace isobit {

// SmolLM2 is kLlama.
enum class Architecture { kLlama, kMistral, kQwen2, kQwen3 };

// "LlamaForCausalLM", ...: the names in config.json.
const char* ArchitectureName(Architecture architecture);
// "llama", ...: their model_type.
const char* ModelTypeName(Architecture architecture);

enum class RopeType { kDefault, kLinear, kLlama3, kYarn };

// How the frequencies theta^(-2i/head_dim) are stretched for contexts longer than those of the
// pretraining.
struct RopeScaling {
  RopeType type = RopeType::kDefault;
  double factor = 1;                         // all but kDefault: divides frequencies
  double low_freq_factor = 1;                // kLlama3
  double high_freq_factor = 4;               // kLlama3; greater than low_freq_factor
  int original_max_position_embeddings = 0;  // kLlama3, kYarn; tokens
  double beta_fast = 32;                     // kYarn; greater than beta_slow
  double beta_slow = 1;                      // kYarn
  bool truncate = true;                      // kYarn
  double attention_factor = 0;               // kYarn; 0: follows from factor, and mscale if not 0
  double mscale = 0;                         // kYarn; 0, as for mscale_all_dim: not used
  double mscale_all_dim = 0;                 // kYarn
};

inline constexpr int kMaxPositions = 1 << 24;

struct ModelConfig {
  Architecture architecture = Architecture::kLlama;
  int vocab_size = 0;
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_layers = 0;
  int num_heads = 0;  // query heads; a multiple of num_kv_heads
  int num_kv_heads = 0;
  int head_dim = 0;  // even, at most 256; need not be hidden_size / num_heads
  float rms_norm_eps = 0;
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  int max_position_embeddings = 0;  // tokens; under yarn, of the stretched context
  bool tie_word_embeddings = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;  // RMSNorm over head_dim of each query and key head, before RoPE

  // Sliding windows, one per layer; empty if every layer sees the whole past. 0: the layer sees the
  // whole past. w > 0: the token at position i sees positions i - w + 1 to i.
  std::vector<int> layer_windows;

  std::vector<int> eos_token_ids;    // from generation_config.json if it has them
  int bos_token_id = -1;             // -1: none
  DType torch_dtype = DType::kBf16;  // what config.json says; each tensor has its own

  // The fields that LoadPolicy let pass, as "name (value)".
  std::vector<std::string> ignored_fields;

  // Settings of generation, which requests bring themselves, as 'file: "name" (value "...")'.
  std::vector<std::string> generation_fields;

  int WindowOfLayer(int layer) const {
    return layer_windows.empty() ? 0 : layer_windows[static_cast<size_t>(layer)];
  }

  // Lines "name=value" for every field that can change a bit of a logprob, floats in hex. Equal
  // strings, Settings and weights mean equal bits. torch_dtype and fields not applied are left out.
  std::string CanonicalString() const;

  // The other settings that can change a token: the end-of-sequence ids, which min_tokens bans, and
  // the context length: "eos_token_ids=1,7 max_position_embeddings=4096". In v1::Fingerprint.
  std::string Settings() const;
};

// Checks ranges and divisibility of a config from any source. Upper bounds keep a hostile file from
// asking for absurd amounts of memory. INVALID_ARGUMENT names the config.json field, its value and
// its bounds.
absl::Status ValidateModelConfig(const ModelConfig& config);

// Parses config.json and, if not empty, generation_config.json, of which only eos_token_id and
// bos_token_id are applied: requests bring their own sampling parameters. Accepts what transformers
// 4 and 5 write (torch_dtype or dtype, rope_theta and rope_scaling or rope_parameters,
// layer_types), with transformers 5's meaning (tests/accuracy/config_test.cc). INVALID_ARGUMENT:
// the JSON is malformed; a field is missing or has a wrong type; `policy` does not let pass a field
// that isobit does not apply, or ignores one that it applies; or ValidateModelConfig fails.
absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& config_json,
                                             const std::string& generation_config_json = "",
                                             const LoadPolicy& policy = {});

// Reads both files from `directory`; generation_config.json may be absent. `root`: see
// Checkpoint::Open. Errors: those of ParseModelConfig; NOT_FOUND; INVALID_ARGUMENT, naming the
// file: the directory has an adapter, without which the base is another model.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& directory,
                                            const std::string& root = "",
                                            const LoadPolicy& policy = {});

// Writes config.json and generation_config.json such that this parser and Hugging Face transformers
// load them. (transformers 5 refuses a Llama whose hidden_size is no multiple of num_heads.)
// INVALID_ARGUMENT: ValidateModelConfig fails, or the architecture's config.json cannot express the
// config, for instance mlp_bias outside Llama.
absl::Status WriteConfigJson(const ModelConfig& config, const std::string& directory);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_MODEL_CONFIG_H_
