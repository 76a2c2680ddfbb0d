// Where a service's weights come from: the files of its model directory, or a seed.
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
  kDummy,  // random_weights.h, to measure the speed of a model's shape
};

// "auto" or "dummy". INVALID_ARGUMENT: any other name.
absl::StatusOr<LoadFormat> ParseLoadFormat(absl::string_view name);

// Opens the model in `model_path`, relative to `model_root`. Neither the directory nor its files
// may lie outside `model_root`. kAuto: reads config.json, the index and the headers of the
// safetensors. kDummy: the weights of a directory with a config.json but no safetensors, from the
// seed that WriteDummySeed wrote there, or 0. `isobit-model make` writes the same weights for that
// seed. They take no memory until they are read. Their digest is computed from config and seed, not
// from bytes, and differs from every checkpoint's. Errors name the file, tensor or field: those of
// ResolveModelPath, LoadModelConfig, Checkpoint::Open, ValidateTensors and CheckRounding;
// INVALID_ARGUMENT also if the directory has safetensors or a malformed seed. Logs Warnings
// (opened_model.h).
absl::StatusOr<OpenedModel> OpenModelAs(LoadFormat format, const std::string& model_root,
                                        const std::string& model_path,
                                        const LoadPolicy& policy = {});

// Writes the file with the seed of `directory`.
absl::Status WriteDummySeed(uint64_t seed, const std::string& directory);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_LOAD_FORMAT_H_
