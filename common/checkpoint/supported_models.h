// What the table of models, python/isobit/supported_models.json, says of an architecture. The
// parser decides what is supported (model_config_parser.cc); a test holds the table to it.
#ifndef ISOBIT_COMMON_CHECKPOINT_SUPPORTED_MODELS_H_
#define ISOBIT_COMMON_CHECKPOINT_SUPPORTED_MODELS_H_

#include <string>

#include "absl/strings/string_view.h"

namespace isobit {

// The table's text, built into the program.
extern const char kSupportedModelsJson[];

// For the error about an architecture that is not supported, after its name: its family and why it
// is not, where the table knows it, and the families that are. For example " (Mixtral: mixture of
// experts: ...), supported: Llama (LlamaForCausalLM), ...".
std::string DescribeUnsupported(absl::string_view architecture);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_SUPPORTED_MODELS_H_
