// JSON from untrusted files: bounded depth and size, no duplicate keys, no exceptions.
#ifndef ISOBIT_COMMON_CHECKPOINT_STRICT_JSON_H_
#define ISOBIT_COMMON_CHECKPOINT_STRICT_JSON_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace isobit {

// The JSON object in `text`. `source` names the text in errors. INVALID_ARGUMENT: `text` is not
// JSON or not an object, is nested deeper than 32, has more than 8 million values, or has a key
// twice in one object (parsers differ on which one counts).
absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text, const std::string& source);

// Makes untrusted text safe for an error message: in double quotes, control bytes escaped, cut
// after 120 bytes.
std::string Quoted(absl::string_view text);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_STRICT_JSON_H_
