// Makes the tiny models on first use, in a directory that lives as long as the process. See
// tiny_models.h.
#include "tests/invariance/tiny_models.h"

#include <filesystem>

#include "common/base/check.h"
#include "tests/support/temp_dir.h"
#include "tools/model_shapes.h"
#include "tools/random_model.h"

namespace isobit::invariance {
namespace {

const testing_support::TempDir& Root() {
  static const testing_support::TempDir root;
  return root;
}

// Common to both witnesses: sizes that do not divide equally among the leaves.
ModelConfig Witness(Architecture architecture) {
  ModelConfig config;
  config.architecture = architecture;
  config.num_kv_heads = 2;
  config.rms_norm_eps = 1e-6f;
  config.max_position_embeddings = 2048;
  config.eos_token_ids = {1};
  return config;
}

ModelConfig WitnessDeep() {
  ModelConfig config = Witness(Architecture::kQwen3);
  config.vocab_size = 203;
  config.hidden_size = 604;
  config.intermediate_size = 331;
  config.num_layers = 16;
  config.num_heads = 6;
  config.head_dim = 64;
  config.qk_norm = true;
  config.rope_theta = 1e6;
  return config;
}

ModelConfig WitnessLong() {
  ModelConfig config = Witness(Architecture::kLlama);
  config.vocab_size = 101;
  config.hidden_size = 72;
  config.intermediate_size = 56;
  config.num_layers = 4;
  config.num_heads = 8;
  config.head_dim = 64;
  return config;
}

ModelConfig ConfigOf(const std::string& name) {
  if (name == "witness-deep") return WitnessDeep();
  if (name == "witness-long") return WitnessLong();
  const auto config = NamedModelShape(name);
  ISOBIT_CHECK(config.ok()) << config.status().ToString();
  return *config;
}

}  // namespace

std::vector<std::string> WitnessModelNames() { return {"witness-deep", "witness-long"}; }

std::vector<std::string> TinyModelNames() {
  return {"tiny-qwen3", "tiny-qwen2", "tiny-llama", "tiny-mistral"};
}

std::string TinyModelRoot() { return Root().path(); }

std::string TinyModelDirectory(const std::string& name) {
  const std::string directory = Root().File(name);
  if (std::filesystem::exists(directory)) return directory;
  const absl::Status made = MakeRandomModel(ConfigOf(name), kTinyModelSeed, directory);
  ISOBIT_CHECK(made.ok()) << made.ToString();
  return directory;
}

}  // namespace isobit::invariance
