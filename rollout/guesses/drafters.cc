// From names to drafters.
#include "rollout/guesses/drafters.h"

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace isobit {
namespace {

std::unique_ptr<Drafter> Make(absl::string_view name, const DrafterLimits& limits) {
  if (name == "lookup") return MakeLookupDrafter();
  if (name == "history") return MakeHistoryDrafter(limits.history_bytes);
  return nullptr;
}

}  // namespace

absl::StatusOr<std::function<std::vector<std::unique_ptr<Drafter>>()>> DraftersOf(
    absl::string_view names, const DrafterLimits& limits) {
  if (names == "off") return nullptr;
  const std::vector<std::string> all = absl::StrSplit(names, ',');
  for (const std::string& name : all) {
    if (Make(name, limits) == nullptr || std::ranges::count(all, name) > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--speculation is \"", names,
                       "\", expected off, fast_path, or each at most once, separated by commas: "
                       "history, lookup"));
    }
  }
  return [all, limits] {
    std::vector<std::unique_ptr<Drafter>> drafters;
    for (const std::string& name : all) drafters.push_back(Make(name, limits));
    return drafters;
  };
}

}  // namespace isobit
