// Makes checkpoints out of seeds. See load_format.h.
#include "kernels/model/load_format.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/digest.h"
#include "common/base/file_error.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/atomic_file.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/model_directory.h"
#include "common/checkpoint/readable_file.h"
#include "common/checkpoint/strict_json.h"
#include "common/checkpoint/tensor_plan.h"
#include "common/checkpoint/validate_tensors.h"
#include "kernels/model/model_plan.h"
#include "kernels/model/random_weights.h"

namespace isobit {
namespace {

namespace fs = std::filesystem;

constexpr char kSeedFile[] = "dummy_weights.json";

// A directory with weights that would not be used is surely a mistake.
absl::Status CheckNoSafetensors(const std::string& directory) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    if (entry.path().extension() != ".safetensors") continue;
    return absl::InvalidArgumentError(
        absl::StrCat("load_format dummy makes weights from a seed, but the directory holds ",
                     entry.path().filename().string(), ", which auto would load"));
  }
  return error ? FileError(error.value(), absl::StrCat("cannot read ", directory))
               : absl::OkStatus();
}

absl::StatusOr<uint64_t> ReadSeed(const std::string& directory, const std::string& root) {
  constexpr size_t kMaxBytes = 4096;
  const absl::StatusOr<std::string> path = ResolveFileInside(directory, kSeedFile, root);
  if (absl::IsNotFound(path.status())) return 0;
  ISOBIT_RETURN_IF_ERROR(path.status());
  ISOBIT_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(*path, kMaxBytes));
  ISOBIT_ASSIGN_OR_RETURN(const nlohmann::json object, ParseJsonObject(text, kSeedFile));
  const auto seed = object.find("seed");
  if (seed != object.end() && seed->is_number_unsigned()) return seed->get<uint64_t>();
  return absl::InvalidArgumentError(absl::StrCat(kSeedFile, ": seed: expected 0 to 2^64 - 1"));
}

// Weights that are stored nowhere, but computed when they are read.
class SeededWeights final : public TensorSource {
 public:
  SeededWeights(const ModelConfig& config, uint64_t seed) {
    std::vector<ExpectedTensor> specs = ExpectedTensors(ModelPlan(config));
    std::sort(specs.begin(), specs.end(),
              [](const ExpectedTensor& a, const ExpectedTensor& b) { return a.name < b.name; });
    for (const ExpectedTensor& spec : specs) {
      tensors_.push_back({.name = spec.name,
                          .dtype = DType::kBf16,
                          .shape = spec.shape,
                          .size_bytes = spec.NumElements() * ItemSize(DType::kBf16)});
      drawn_.emplace_back(spec, seed);
    }
    const std::string meaning =
        absl::StrCat("isobit dummy weights\nseed=", seed, "\n", config.CanonicalString());
    digest_ = Sha256Hex(meaning.data(), meaning.size());
  }

  absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const override {
    drawn_[tensor].Draw(first / sizeof(uint16_t), size / sizeof(uint16_t),
                        reinterpret_cast<uint16_t*>(out));
    return absl::OkStatus();
  }
  std::string known_digest() const override { return digest_; }

 private:
  std::vector<RandomTensor> drawn_;  // [tensor]
  std::string digest_;
};

absl::StatusOr<OpenedModel> OpenCheckpoint(const std::string& model_root,
                                           const std::string& model_path,
                                           const LoadPolicy& policy) {
  ISOBIT_ASSIGN_OR_RETURN(const std::string directory, ResolveModelPath(model_root, model_path));
  ISOBIT_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(directory, model_root, policy));
  ISOBIT_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(directory, model_root));
  ISOBIT_RETURN_IF_ERROR(ValidateTensors(ModelPlan(config), checkpoint));
  ISOBIT_RETURN_IF_ERROR(CheckRounding(checkpoint, policy));
  return OpenedModel{std::move(config), std::make_unique<Checkpoint>(std::move(checkpoint))};
}

absl::StatusOr<OpenedModel> OpenDummy(const std::string& model_root, const std::string& model_path,
                                      const LoadPolicy& policy) {
  ISOBIT_ASSIGN_OR_RETURN(const std::string directory, ResolveModelPath(model_root, model_path));
  ISOBIT_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(directory, model_root, policy));
  ISOBIT_RETURN_IF_ERROR(CheckNoSafetensors(directory));
  ISOBIT_ASSIGN_OR_RETURN(const uint64_t seed, ReadSeed(directory, model_root));
  auto weights = std::make_unique<SeededWeights>(config, seed);
  return OpenedModel{std::move(config), std::move(weights)};
}

}  // namespace

absl::StatusOr<LoadFormat> ParseLoadFormat(absl::string_view name) {
  if (name == "auto") return LoadFormat::kAuto;
  if (name == "dummy") return LoadFormat::kDummy;
  return absl::InvalidArgumentError(
      absl::StrCat("load_format: expected auto or dummy, got \"", name, "\""));
}

absl::StatusOr<OpenedModel> OpenModelAs(LoadFormat format, const std::string& model_root,
                                        const std::string& model_path, const LoadPolicy& policy) {
  ISOBIT_ASSIGN_OR_RETURN(OpenedModel model, format == LoadFormat::kAuto
                                                 ? OpenCheckpoint(model_root, model_path, policy)
                                                 : OpenDummy(model_root, model_path, policy));
  for (const std::string& warning : Warnings(model.config, *model.weights)) {
    ISOBIT_LOG(Warning) << model_path << ": " << warning;
  }
  return model;
}

absl::Status WriteDummySeed(uint64_t seed, const std::string& directory) {
  const std::string text = absl::StrCat("{\"seed\": ", seed, "}\n");
  return WriteFileAtomically((fs::path(directory) / kSeedFile).string(), {text});
}

}  // namespace isobit
