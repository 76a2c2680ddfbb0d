// JSON from files we do not trust: bounded depth and size, no duplicate keys, no exceptions.
#ifndef ISOBIT_COMMON_CHECKPOINT_STRICT_JSON_H_
#define ISOBIT_COMMON_CHECKPOINT_STRICT_JSON_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace isobit {

// The JSON object in `text`. `source` names the text in errors. INVALID_ARGUMENT: not JSON, not an
// object, nested deeper than 32, more than 8 million values, or a key that occurs twice in one
// object (where parsers differ on which one counts).
absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text, const std::string& source);

// Untrusted text made fit for an error message: control bytes escaped, cut after 120 bytes, in
// double quotes.
std::string Quoted(absl::string_view text);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_STRICT_JSON_H_
