// Model directories with random weights: for tests, benchmarks and demonstrations that need a model
// of some shape and no meaning.
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
  // A file holds at most that many bytes of tensors, unless one tensor alone is larger; a model
  // that needs several files gets an index.
  size_t max_file_bytes = size_t{2} << 30;
  // Called after each tensor.
  std::function<void(uint64_t done_bytes, uint64_t total_bytes)> on_progress = nullptr;
};

// Writes a directory that Hugging Face transformers loads: config.json, generation_config.json and
// bf16 safetensors of RandomTensor (kernels/model/random_weights.h), the same bytes on every
// machine and for every file size. Creates `directory` if need be. INVALID_ARGUMENT: as
// WriteConfigJson. ALREADY_EXISTS: `directory` is not empty.
absl::Status MakeRandomModel(const ModelConfig& config, uint64_t seed, const std::string& directory,
                             const RandomModelOptions& options = {});

// Likewise without the safetensors: for load_format dummy, which makes the same weights.
absl::Status MakeDummyModel(const ModelConfig& config, uint64_t seed, const std::string& directory);

// Creates `directory`, with its parents, if need be. ALREADY_EXISTS: it is not empty.
absl::Status CreateEmptyDirectory(const std::string& directory);

}  // namespace isobit

#endif  // ISOBIT_TOOLS_RANDOM_MODEL_H_
