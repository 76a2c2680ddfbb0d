// Suggests the flag that a misspelt flag may have meant.
#ifndef ISOBIT_COMMON_CONFIG_FLAG_HINTS_H_
#define ISOBIT_COMMON_CONFIG_FLAG_HINTS_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace isobit {

// "; did you mean --tp_size?", or nothing. name: the flag as it was written, without dashes. known:
// the program's flags. Knows the spellings of vLLM and SGLang and dashes between words, and finds
// the nearest flag to a misspelt name.
std::string FlagHint(absl::string_view name, const std::vector<std::string>& known);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CONFIG_FLAG_HINTS_H_
