// The settings of isobit-trainer, checked, and those of them that affect the weights.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_SETTINGS_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_SETTINGS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace isobit::trainer {

// The settings that affect the weights; they stay the same from a run's first step to its last.
struct Recipe {
  std::string model;  // the directory of the initial model
  std::string task = "share";
  std::string algorithm = "grpo";
  int64_t prompts = 8;
  int64_t samples = 8;
  int64_t max_tokens = 64;
  double temperature = 1.0;
  uint64_t seed = 1;
  double lr = 1e-6;
  double weight_decay = 0.0;
  double max_norm = 1.0;
  double clip = 0.2;
  int64_t pack_tokens = 4096;
  int64_t lanes = 8;
};

struct Settings {
  Recipe recipe;
  std::string rollout;     // host:port
  std::string scorer;      // empty: none
  std::string comparator;  // empty: none
  std::string output;
  bool resume = false;
  int64_t steps = 100;
  int64_t save_every = 10;
  std::string on_gap = "stop";
  std::optional<int> metrics_port;  // on 127.0.0.1; 0: the system chooses
};

// INVALID_ARGUMENT names the flag, what was expected and what came.
absl::Status CheckSettings(const Settings& settings);

// The recipe in the form that recipe.json has.
nlohmann::json ToJson(const Recipe& recipe);

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_SETTINGS_H_
