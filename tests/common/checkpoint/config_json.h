// config.json as the tests of its parser write it.
#ifndef ISOBIT_TESTS_COMMON_CHECKPOINT_CONFIG_JSON_H_
#define ISOBIT_TESTS_COMMON_CHECKPOINT_CONFIG_JSON_H_

#include <string>

#include "nlohmann/json.hpp"

namespace isobit::testing_support {

// A config of `architecture` with only what every one must say.
inline nlohmann::json Base(const std::string& architecture) {
  return {{"architectures", nlohmann::json::array({architecture})},
          {"vocab_size", 1000},
          {"hidden_size", 576},
          {"intermediate_size", 1536},
          {"num_hidden_layers", 4},
          {"num_attention_heads", 9},
          {"num_key_value_heads", 3},
          {"head_dim", 64},
          {"hidden_act", "silu"},
          {"rms_norm_eps", 1e-5},
          {"max_position_embeddings", 8192},
          {"rope_theta", 100000}};
}

inline nlohmann::json With(nlohmann::json config, const nlohmann::json& changes) {
  config.update(changes);
  return config;
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_COMMON_CHECKPOINT_CONFIG_JSON_H_
