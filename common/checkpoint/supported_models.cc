// Reads the table for error messages. See supported_models.h.
#include "common/checkpoint/supported_models.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"

namespace isobit {

std::string DescribeUnsupported(absl::string_view architecture) {
  const nlohmann::json table = nlohmann::json::parse(kSupportedModelsJson);
  std::string reason;
  std::vector<std::string> supported;
  for (const nlohmann::json& row : table["families"]) {
    const std::string family = row["family"].get<std::string>();
    const std::vector<std::string> names = row["architectures"].get<std::vector<std::string>>();
    if (row["supported"].get<bool>()) {
      supported.push_back(absl::StrCat(family, " (", absl::StrJoin(names, ", "), ")"));
    } else if (std::find(names.begin(), names.end(), architecture) != names.end()) {
      reason = absl::StrCat(" (", family, ": ", row["why"].get<std::string>(), ")");
    }
  }
  return absl::StrCat(reason, ", supported: ", absl::StrJoin(supported, ", "));
}

}  // namespace isobit
