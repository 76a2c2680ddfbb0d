// What the table of models, python/isobit/supported_models.json, says about an architecture. The
// parser decides what is supported (model_config_parser.cc); a test compares the table with it.
#ifndef ISOBIT_COMMON_CHECKPOINT_SUPPORTED_MODELS_H_
#define ISOBIT_COMMON_CHECKPOINT_SUPPORTED_MODELS_H_

#include <string>

#include "absl/strings/string_view.h"

namespace isobit {

// The table's text, built into the program.
extern const char kSupportedModelsJson[];

// Text that follows an unsupported architecture's name in the error: its family and the reason, if
// the table knows it, and the families that are supported. For example " (Mixtral: mixture of
// experts: ...), supported: Llama (LlamaForCausalLM), ...".
std::string DescribeUnsupported(absl::string_view architecture);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_SUPPORTED_MODELS_H_
