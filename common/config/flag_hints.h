// What a flag that does not exist may have meant.
#ifndef ISOBIT_COMMON_CONFIG_FLAG_HINTS_H_
#define ISOBIT_COMMON_CONFIG_FLAG_HINTS_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace isobit {

// "; did you mean --tp_size?", or nothing. name: without dashes, as it was written. known: the
// program's flags. It knows the spellings of vLLM and SGLang, dashes between words, and finds the
// nearest of misspelt names.
std::string FlagHint(absl::string_view name, const std::vector<std::string>& known);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CONFIG_FLAG_HINTS_H_
