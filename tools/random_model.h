// Model directories with random weights, for tests, benchmarks and demonstrations that need only a
// model's shape.
#ifndef ISOBIT_TOOLS_RANDOM_MODEL_H_
#define ISOBIT_TOOLS_RANDOM_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "common/checkpoint/model_config.h"

namespace isobit {

struct RandomModelOptions {
  // A file holds at most this many bytes of tensors, or one larger tensor alone. A model of several
  // files gets an index.
  size_t max_file_bytes = size_t{2} << 30;
  // Called after each tensor.
  std::function<void(uint64_t done_bytes, uint64_t total_bytes)> on_progress = nullptr;
};

// Writes a directory that Hugging Face transformers loads: config.json, generation_config.json and
// bf16 safetensors of RandomTensor (kernels/model/random_weights.h), whose values are the same on
// every machine and for every file size. Creates `directory` if need be. INVALID_ARGUMENT: as
// WriteConfigJson. ALREADY_EXISTS: `directory` is not empty.
absl::Status MakeRandomModel(const ModelConfig& config, uint64_t seed, const std::string& directory,
                             const RandomModelOptions& options = {});

// Likewise without the safetensors. Load format `dummy` makes the same weights from it.
absl::Status MakeDummyModel(const ModelConfig& config, uint64_t seed, const std::string& directory);

// Creates `directory`, with its parents, if need be. ALREADY_EXISTS: it is not empty.
absl::Status CreateEmptyDirectory(const std::string& directory);

}  // namespace isobit

#endif  // ISOBIT_TOOLS_RANDOM_MODEL_H_
