// Which fields of config.json isobit may ignore.
#ifndef ISOBIT_COMMON_CHECKPOINT_CONFIG_FIELDS_H_
#define ISOBIT_COMMON_CHECKPOINT_CONFIG_FIELDS_H_

#include <string>

#include "absl/strings/string_view.h"

namespace isobit {

// Whether the field cannot change a logprob of a decoder at inference, whatever its value. Such
// fields are settings of training, generation, caching, export and classification heads, and notes
// of tools.
bool IsHarmlessField(absl::string_view name);

// Whether the field is a default of transformers' generate() that can change a token. A service
// does not apply it. (eos_token_id is no such field: services apply it.)
bool IsGenerationField(absl::string_view name);

// Whether LoadPolicy::ignored_fields must not name the field, because without it the logprobs would
// be those of another model: it says what the tensors mean or what the layers compute.
bool IsNeverIgnoredField(absl::string_view name);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_CONFIG_FIELDS_H_
