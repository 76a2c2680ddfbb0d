// What isobit-trainer's command line may say.
#include "trainer_bridge/trainer/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "tests/support/status_matchers.h"

namespace isobit::trainer {
namespace {

using testing::HasSubstr;
using testing_support::IsOk;
using testing_support::StatusIs;

Settings Good() {
  Settings settings;
  settings.recipe.model = "models/m";
  settings.rollout = "127.0.0.1:7001";
  settings.output = "runs/r";
  return settings;
}

TEST(SettingsTest, NamesWhatIsWrong) {
  EXPECT_THAT(CheckSettings(Good()), IsOk());
  using Change = std::function<void(Settings&)>;
  const std::vector<std::pair<const char*, Change>> cases = {
      {"--model must be given", [](Settings& s) { s.recipe.model = ""; }},
      {"--rollout must be given", [](Settings& s) { s.rollout = ""; }},
      {"--output must be given", [](Settings& s) { s.output = ""; }},
      {"--task is sums, expected share", [](Settings& s) { s.recipe.task = "sums"; }},
      {"--algorithm is ppo, expected grpo or reinforce",
       [](Settings& s) { s.recipe.algorithm = "ppo"; }},
      {"--on_gap is go, expected stop or report", [](Settings& s) { s.on_gap = "go"; }},
      {"--steps is 0", [](Settings& s) { s.steps = 0; }},
      {"--save_every is -1", [](Settings& s) { s.save_every = -1; }},
      {"--metrics_port is 65536", [](Settings& s) { s.metrics_port = 65536; }},
      {"--prompts is 0", [](Settings& s) { s.recipe.prompts = 0; }},
      {"--samples is 0", [](Settings& s) { s.recipe.samples = 0; }},
      {"--max_tokens is 0", [](Settings& s) { s.recipe.max_tokens = 0; }},
      {"--temperature is 0", [](Settings& s) { s.recipe.temperature = 0; }},
      {"--seed is 4294967296", [](Settings& s) { s.recipe.seed = uint64_t{1} << 32; }},
      {"--lr is nan", [](Settings& s) { s.recipe.lr = std::nan(""); }},
      {"--weight_decay is -1", [](Settings& s) { s.recipe.weight_decay = -1; }},
      {"--max_norm is -1", [](Settings& s) { s.recipe.max_norm = -1; }},
      {"--max_norm is 0", [](Settings& s) { s.recipe.max_norm = 0; }},
      {"--max_norm is nan", [](Settings& s) { s.recipe.max_norm = std::nan(""); }},
      {"--clip is 2", [](Settings& s) { s.recipe.clip = 2; }},
      {"--clip is -1", [](Settings& s) { s.recipe.clip = -1; }},
      {"--clip is nan", [](Settings& s) { s.recipe.clip = std::nan(""); }},
      {"--pack_tokens is 0", [](Settings& s) { s.recipe.pack_tokens = 0; }},
      {"--lanes is 128", [](Settings& s) { s.recipe.lanes = 128; }},
      {"--lanes is 12, expected a power of two", [](Settings& s) { s.recipe.lanes = 12; }},
  };
  for (const auto& [message, change] : cases) {
    Settings settings = Good();
    change(settings);
    EXPECT_THAT(CheckSettings(settings),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
  }
}

}  // namespace
}  // namespace isobit::trainer
