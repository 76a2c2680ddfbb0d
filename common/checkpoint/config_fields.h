// Which fields of config.json isobit may ignore.
#ifndef ISOBIT_COMMON_CHECKPOINT_CONFIG_FIELDS_H_
#define ISOBIT_COMMON_CHECKPOINT_CONFIG_FIELDS_H_

#include <string>

#include "absl/strings/string_view.h"

namespace isobit {

// Whether the field, whatever its value, cannot change a logprob of a decoder at inference. Such
// fields are settings of training, generation, caching, export and classification heads, and notes
// of tools.
bool IsHarmlessField(absl::string_view name);

// Whether the field is a default of transformers' generate() that can change a token. Services do
// not apply such fields. (eos_token_id is not among them: services apply it.)
bool IsGenerationField(absl::string_view name);

// Whether LoadPolicy::ignored_fields must not name the field, because it says what the tensors mean
// or what the layers compute: without it, the logprobs would be those of another model.
bool IsNeverIgnoredField(absl::string_view name);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_CONFIG_FIELDS_H_
