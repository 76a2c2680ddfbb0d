// The checks, flag by flag.
#include "trainer_bridge/trainer/settings.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"

namespace isobit::trainer {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

absl::Status RequireOneOf(const char* name, const std::string& value,
                          absl::Span<const char* const> choices) {
  std::string told;
  for (const char* choice : choices) {
    if (value == choice) return absl::OkStatus();
    absl::StrAppend(&told, told.empty() ? "" : " or ", choice);
  }
  return absl::InvalidArgumentError(absl::StrCat("--", name, " is ", value, ", expected ", told));
}

absl::Status RequireSet(const char* name, const std::string& value) {
  if (!value.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", name, " must be given"));
}

absl::Status CheckRecipe(const Recipe& r) {
  ISOBIT_RETURN_IF_ERROR(RequireSet("model", r.model));
  ISOBIT_RETURN_IF_ERROR(RequireOneOf("task", r.task, {"share"}));
  ISOBIT_RETURN_IF_ERROR(RequireOneOf("algorithm", r.algorithm, {"grpo", "reinforce"}));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("prompts", r.prompts, 1, kMost));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("samples", r.samples, 1, kMost));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_tokens", r.max_tokens, 1, kMost));
  // A greedy draw has no distribution whose logprobs could be differentiated.
  ISOBIT_RETURN_IF_ERROR(RequireInRange("temperature", r.temperature, 0.001, 1000.0));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("seed", r.seed, 0, std::numeric_limits<uint32_t>::max()));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("lr", r.lr, 0.0, 1e6));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("weight_decay", r.weight_decay, 0.0, 1e6));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_norm", r.max_norm, 1e-30, 1e30));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("clip", r.clip, 0.0, 1.0));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("pack_tokens", r.pack_tokens, 1, kMost));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("lanes", r.lanes, 1, 64));
  if ((r.lanes & (r.lanes - 1)) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--lanes is ", r.lanes, ", expected a power of two"));
}

}  // namespace

absl::Status CheckSettings(const Settings& settings) {
  ISOBIT_RETURN_IF_ERROR(CheckRecipe(settings.recipe));
  ISOBIT_RETURN_IF_ERROR(RequireSet("rollout", settings.rollout));
  ISOBIT_RETURN_IF_ERROR(RequireSet("output", settings.output));
  ISOBIT_RETURN_IF_ERROR(RequireOneOf("on_gap", settings.on_gap, {"stop", "report"}));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("metrics_port", settings.metrics_port.value_or(0), 0, 65535));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("steps", settings.steps, 1, kMost));
  return RequireInRange("save_every", settings.save_every, 1, kMost);
}

nlohmann::json ToJson(const Recipe& r) {
  return {{"model", r.model},
          {"task", r.task},
          {"algorithm", r.algorithm},
          {"prompts", r.prompts},
          {"samples", r.samples},
          {"max_tokens", r.max_tokens},
          {"temperature", r.temperature},
          {"seed", r.seed},
          {"lr", r.lr},
          {"weight_decay", r.weight_decay},
          {"max_norm", r.max_norm},
          {"clip", r.clip},
          {"pack_tokens", r.pack_tokens},
          {"lanes", r.lanes}};
}

}  // namespace isobit::trainer
