// Opens and checks model directories. See opened_model.h.
#include "common/checkpoint/opened_model.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/model_directory.h"
#include "common/checkpoint/tensor_names.h"

namespace isobit {
namespace {

// The "name=value" lines at which two canonical strings first part.
std::string FirstDifference(const std::string& a, const std::string& b) {
  const std::vector<std::string> left = absl::StrSplit(a, '\n');
  const std::vector<std::string> right = absl::StrSplit(b, '\n');
  for (size_t i = 0; i < left.size() && i < right.size(); ++i) {
    if (left[i] != right[i]) return absl::StrCat(left[i], ", expected ", right[i]);
  }
  return "it is shorter or longer";
}

}  // namespace

absl::StatusOr<OpenedModel> OpenModel(const std::string& model_root, const std::string& model_path,
                                      const std::string& expected_digest) {
  ISOBIT_ASSIGN_OR_RETURN(const std::string directory, ResolveModelPath(model_root, model_path));
  ISOBIT_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(directory, model_root));
  ISOBIT_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(directory, model_root));
  ISOBIT_RETURN_IF_ERROR(ValidateCheckpoint(config, checkpoint));
  CheckpointDigests digests = DigestCheckpoint(checkpoint);
  OpenedModel model{std::move(config), std::move(checkpoint), std::move(digests)};
  ISOBIT_RETURN_IF_ERROR(CheckDigest(model, model_path, expected_digest));
  return model;
}

absl::Status CheckDigest(const OpenedModel& model, const std::string& model_path,
                         const std::string& expected_digest) {
  if (expected_digest.empty() || model.digests.checkpoint == expected_digest) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat("weights in ", model_path, " have digest ",
                                                    model.digests.checkpoint, ", expected ",
                                                    expected_digest));
}

std::map<std::string, DType> DTypesOf(const Checkpoint& checkpoint) {
  std::map<std::string, DType> dtypes;
  for (const Tensor& tensor : checkpoint.tensors()) dtypes.emplace(tensor.name, tensor.dtype);
  return dtypes;
}

absl::Status CheckReplacement(const OpenedModel& next, const ModelConfig& config,
                              const std::map<std::string, DType>& dtypes) {
  const std::string canonical = next.config.CanonicalString();
  if (canonical != config.CanonicalString()) {
    return absl::InvalidArgumentError(
        absl::StrCat("config.json states another model: ",
                     FirstDifference(canonical, config.CanonicalString())));
  }
  for (const Tensor& tensor : next.checkpoint.tensors()) {
    const auto it = dtypes.find(tensor.name);
    if (it != dtypes.end() && it->second != tensor.dtype) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor.name, " is ",
                                                     SafetensorsName(tensor.dtype), ", expected ",
                                                     SafetensorsName(it->second)));
    }
  }
  return absl::OkStatus();
}

}  // namespace isobit
