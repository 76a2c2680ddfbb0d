// The source of a service's weights: the files of its model directory, or a seed.
#ifndef ISOBIT_KERNELS_MODEL_LOAD_FORMAT_H_
#define ISOBIT_KERNELS_MODEL_LOAD_FORMAT_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/opened_model.h"

namespace isobit {

enum class LoadFormat {
  kAuto,   // the directory's safetensors
  kDummy,  // random_weights.h, for speed measurements of a shape
};

// "auto" or "dummy"; INVALID_ARGUMENT: another name.
absl::StatusOr<LoadFormat> ParseLoadFormat(absl::string_view name);

// kAuto: OpenModel (opened_model.h). kDummy: the weights of a directory with a config.json and no
// safetensors, from the seed that WriteDummySeed left there, or 0; they are those that isobit-model
// make writes for that seed. They take no memory before they are read. Their digest is one of
// config and seed, not of bytes, and differs from every checkpoint's. Errors: those of OpenModel;
// INVALID_ARGUMENT, too, if the directory holds safetensors or a malformed seed. Logs Warnings
// (opened_model.h).
absl::StatusOr<OpenedModel> OpenModelAs(LoadFormat format, const std::string& model_root,
                                        const std::string& model_path,
                                        const LoadPolicy& policy = {});

// Writes the file that gives `directory` its seed.
absl::Status WriteDummySeed(uint64_t seed, const std::string& directory);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_LOAD_FORMAT_H_
