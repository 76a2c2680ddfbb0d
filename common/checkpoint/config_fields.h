// Which fields of config.json isobit may pass over.
#ifndef ISOBIT_COMMON_CHECKPOINT_CONFIG_FIELDS_H_
#define ISOBIT_COMMON_CHECKPOINT_CONFIG_FIELDS_H_

#include <string>

#include "absl/strings/string_view.h"

namespace isobit {

// Cannot change a logprob of a decoder at inference, whatever its value: settings of training,
// generation, caching, export and classification heads, and notes of tools.
bool IsHarmlessField(absl::string_view name);

// May not be named in LoadPolicy::ignored_fields, because the logprobs without it would be those of
// another model: what the tensors mean, what the layers compute.
bool IsNeverIgnoredField(absl::string_view name);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_CONFIG_FIELDS_H_
