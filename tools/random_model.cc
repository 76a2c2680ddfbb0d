// Draws and writes random weights, file by file. See random_model.h.
#include "tools/random_model.h"

#include <bit>
#include <cmath>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/tensor_names.h"

namespace isobit {
namespace {

namespace fs = std::filesystem;

// A bijection of 64-bit words whose output bits all depend on all input bits (the finaliser of
// SplitMix64).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Nearly normal, mean 0, variance 1, within +-3.47: the sum of four uniform 16-bit numbers. Integer
// sums and one product have the same bits on every machine; a libm's logarithm has not.
float NearlyNormal(uint64_t random) {
  const int sum = static_cast<int>((random & 0xffff) + ((random >> 16) & 0xffff) +
                                   ((random >> 32) & 0xffff) + (random >> 48));
  constexpr float kInverseDeviation = 0x1.bb67aep-16f;  // of the sum: sqrt(3) / 2^16
  return static_cast<float>(sum - 2 * 65535) * kInverseDeviation;
}

// Element i is mean + deviation * NearlyNormal.
struct Distribution {
  float mean;
  float deviation;
};

Distribution DistributionOf(const TensorSpec& spec) {
  constexpr float kLogitSpread = 2.5f;
  if (absl::EndsWith(spec.name, "norm.weight")) return {1.0f, 0.1f};
  if (absl::EndsWith(spec.name, ".bias")) return {0.0f, 0.1f};
  const float unit = 1.0f / std::sqrt(static_cast<float>(spec.shape[1]));
  const bool head = spec.name == kEmbeddingName || spec.name == kLmHeadName;
  return {0.0f, head ? kLogitSpread * unit : unit};
}

size_t NumElements(const TensorSpec& spec) {
  size_t count = 1;
  for (const int64_t size : spec.shape) count *= static_cast<size_t>(size);
  return count;
}

std::vector<uint16_t> Draw(const TensorSpec& spec, uint64_t seed) {
  uint64_t key = Mix(seed + 0x9e3779b97f4a7c15);
  for (const char c : spec.name) key = Mix(key ^ static_cast<uint8_t>(c));
  const Distribution distribution = DistributionOf(spec);
  std::vector<uint16_t> values(NumElements(spec));
  for (size_t i = 0; i < values.size(); ++i) {
    const float x = distribution.deviation * NearlyNormal(Mix(key + 0x9e3779b97f4a7c15 * (i + 1)));
    values[i] = Bf16FromF32Bits(std::bit_cast<uint32_t>(distribution.mean + x));
  }
  return values;
}

// Consecutive tensors for each file.
std::vector<std::vector<TensorSpec>> PlanFiles(const ModelConfig& config, size_t max_file_bytes) {
  std::vector<std::vector<TensorSpec>> files(1);
  size_t bytes = 0;
  for (TensorSpec& spec : ExpectedTensors(config)) {
    const size_t size = NumElements(spec) * sizeof(uint16_t);
    if (!files.back().empty() && bytes + size > max_file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += size;
    files.back().push_back(std::move(spec));
  }
  return files;
}

}  // namespace

absl::Status CreateEmptyDirectory(const std::string& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot create ", directory));
  const bool empty = fs::is_empty(directory, error);
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot read ", directory));
  if (empty) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(directory, " is not empty"));
}

absl::Status MakeRandomModel(const ModelConfig& config, uint64_t seed, const std::string& directory,
                             const RandomModelOptions& options) {
  ISOBIT_RETURN_IF_ERROR(ValidateModelConfig(config));
  ISOBIT_RETURN_IF_ERROR(CreateEmptyDirectory(directory));
  const std::vector<std::vector<TensorSpec>> files = PlanFiles(config, options.max_file_bytes);
  uint64_t total_bytes = 0;
  for (const auto& file : files) {
    for (const TensorSpec& spec : file) total_bytes += NumElements(spec) * sizeof(uint16_t);
  }

  std::map<std::string, std::string> file_of;
  uint64_t done_bytes = 0;
  for (size_t f = 0; f < files.size(); ++f) {
    const std::string name =
        files.size() == 1 ? "model.safetensors"
                          : absl::StrFormat("model-%05d-of-%05d.safetensors", f + 1, files.size());
    std::vector<std::vector<uint16_t>> values;
    std::vector<Tensor> tensors;
    for (const TensorSpec& spec : files[f]) {
      values.push_back(Draw(spec, seed));
      const size_t bytes = values.back().size() * sizeof(uint16_t);
      tensors.push_back({.name = spec.name,
                         .dtype = DType::kBf16,
                         .shape = spec.shape,
                         .data = reinterpret_cast<const uint8_t*>(values.back().data()),
                         .size_bytes = bytes});
      file_of[spec.name] = name;
      done_bytes += bytes;
      if (options.on_progress) options.on_progress(done_bytes, total_bytes);
    }
    // What Hugging Face transformers asks for.
    ISOBIT_RETURN_IF_ERROR(WriteSafetensors((fs::path(directory) / name).string(),
                                            std::move(tensors), {{"format", "pt"}}));
  }
  if (files.size() > 1) {
    ISOBIT_RETURN_IF_ERROR(WriteSafetensorsIndex(directory, file_of, total_bytes));
  }
  // Last, so that a directory left half written is not taken for a model.
  return WriteConfigJson(config, directory);
}

}  // namespace isobit
