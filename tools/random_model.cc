// Writes random weights, file by file. See random_model.h.
#include "tools/random_model.h"

#include <filesystem>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "kernels/model/load_format.h"
#include "kernels/model/model_plan.h"
#include "kernels/model/random_weights.h"

namespace isobit {
namespace {

namespace fs = std::filesystem;

// Consecutive tensors for each file.
std::vector<std::vector<ExpectedTensor>> PlanFiles(const ModelConfig& config,
                                                   size_t max_file_bytes) {
  std::vector<std::vector<ExpectedTensor>> files(1);
  size_t bytes = 0;
  for (ExpectedTensor& spec : ExpectedTensors(ModelPlan(config))) {
    const size_t size = spec.NumElements() * sizeof(uint16_t);
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
  const std::vector<std::vector<ExpectedTensor>> files = PlanFiles(config, options.max_file_bytes);
  uint64_t total_bytes = 0;
  for (const auto& file : files) {
    for (const ExpectedTensor& spec : file) total_bytes += spec.NumElements() * sizeof(uint16_t);
  }

  std::map<std::string, std::string> file_of;
  uint64_t done_bytes = 0;
  for (size_t f = 0; f < files.size(); ++f) {
    const std::string name =
        files.size() == 1 ? "model.safetensors"
                          : absl::StrFormat("model-%05d-of-%05d.safetensors", f + 1, files.size());
    std::vector<std::vector<uint16_t>> values;
    std::vector<Tensor> tensors;
    for (const ExpectedTensor& spec : files[f]) {
      values.emplace_back(spec.NumElements());
      RandomTensor(spec, seed).Draw(0, values.back().size(), values.back().data());
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
    // Hugging Face transformers requires this metadata.
    ISOBIT_RETURN_IF_ERROR(WriteSafetensors((fs::path(directory) / name).string(),
                                            std::move(tensors), {{"format", "pt"}}));
  }
  if (files.size() > 1) {
    ISOBIT_RETURN_IF_ERROR(WriteSafetensorsIndex(directory, file_of, total_bytes));
  }
  // Last, so that a half written directory is not taken for a model.
  return WriteConfigJson(config, directory);
}

absl::Status MakeDummyModel(const ModelConfig& config, uint64_t seed,
                            const std::string& directory) {
  ISOBIT_RETURN_IF_ERROR(ValidateModelConfig(config));
  ISOBIT_RETURN_IF_ERROR(CreateEmptyDirectory(directory));
  ISOBIT_RETURN_IF_ERROR(WriteDummySeed(seed, directory));
  return WriteConfigJson(config, directory);
}

}  // namespace isobit
