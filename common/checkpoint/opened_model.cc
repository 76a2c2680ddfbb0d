// Checks of rounding, digests and replacements.
#include "common/checkpoint/opened_model.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/strict_json.h"
#include "common/checkpoint/tensor_names.h"
#include "common/checkpoint/tensor_plan.h"
#include "common/checkpoint/validate_tensors.h"

namespace isobit {
namespace {

// The "name=value" lines at which two canonical strings first differ.
std::string FirstDifference(const std::string& a, const std::string& b) {
  const std::vector<std::string> left = absl::StrSplit(a, '\n');
  const std::vector<std::string> right = absl::StrSplit(b, '\n');
  for (size_t i = 0; i < left.size() && i < right.size(); ++i) {
    if (left[i] != right[i]) return absl::StrCat(left[i], ", expected ", right[i]);
  }
  return "it is shorter or longer";
}

// "12 of 34 tensors are F16, model.norm.weight the first", or nothing.
std::string TensorsOf(DType dtype, const TensorSource& weights) {
  const std::vector<Tensor>& tensors = weights.tensors();
  const auto is_one = [dtype](const Tensor& tensor) {
    return tensor.dtype == dtype && !IsRotaryBuffer(tensor.name);
  };
  const auto first = std::find_if(tensors.begin(), tensors.end(), is_one);
  if (first == tensors.end()) return "";
  return absl::StrCat(std::count_if(first, tensors.end(), is_one), " of ", tensors.size(),
                      " tensors are ", SafetensorsName(dtype), ", ", Quoted(first->name),
                      " the first");
}

}  // namespace

absl::Status CheckRounding(const TensorSource& weights, const LoadPolicy& policy) {
  const std::string tensors = TensorsOf(DType::kF16, weights);
  if (tensors.empty() || policy.round_fp16) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(tensors,
                   ", expected BF16 or F32: isobit computes in bf16, whose rounding of fp16 "
                   "weights makes logprobs some ten times less exact than an fp16 "
                   "engine's; --round_fp16_weights accepts that"));
}

std::vector<std::string> Warnings(const ModelConfig& config, const TensorSource& weights) {
  std::vector<std::string> warnings;
  for (const std::string& field : config.ignored_fields) {
    warnings.push_back(absl::StrCat("config.json: field ", field, " is ignored, as told"));
  }
  if (!config.generation_fields.empty()) {
    warnings.push_back(absl::StrCat("not applied, since requests bring their own: ",
                                    absl::StrJoin(config.generation_fields, ", ")));
  }
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    const std::string tensors = TensorsOf(dtype, weights);
    if (!tensors.empty()) warnings.push_back(absl::StrCat(tensors, ": rounded to bf16"));
  }
  return warnings;
}

absl::Status CheckDigest(const std::string& digest, const std::string& expected) {
  if (expected.empty() || digest == expected) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the weights have digest ", digest, ", expected ", expected));
}

absl::StatusOr<std::string> CheckDigests(CheckpointDigests digests, const TensorPlan& plan,
                                         const std::string& expected_digest) {
  ISOBIT_RETURN_IF_ERROR(CheckTiedTensors(plan, digests));
  ISOBIT_RETURN_IF_ERROR(CheckDigest(digests.checkpoint, expected_digest));
  return std::move(digests.checkpoint);
}

absl::Status CheckReplacement(const OpenedModel& next, const ModelConfig& config) {
  const std::string canonical = next.config.CanonicalString();
  if (canonical != config.CanonicalString()) {
    return absl::InvalidArgumentError(
        absl::StrCat("config.json states another model: ",
                     FirstDifference(canonical, config.CanonicalString())));
  }
  if (next.config.Settings() == config.Settings()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("config.json and generation_config.json state ", next.config.Settings(),
                   ", expected ", config.Settings(), ", with which this service was started"));
}

}  // namespace isobit
