// A model directory, opened and checked as a whole before any of its weights is used, and what must
// hold of weights that replace others.
#ifndef ISOBIT_COMMON_CHECKPOINT_OPENED_MODEL_H_
#define ISOBIT_COMMON_CHECKPOINT_OPENED_MODEL_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/tensor_plan.h"
#include "common/checkpoint/tensor_source.h"
#include "common/checkpoint/weight_reader.h"

namespace isobit {

// Names one set of weights.
struct WeightVersion {
  uint64_t id = 0;
  std::string digest;                                      // CheckpointDigests::checkpoint
  std::shared_ptr<const TensorDigests> tensors = nullptr;  // null: unknown
};

// All tensors are present and have the right shapes (OpenModelAs of kernels/model/load_format.h).
// Their bytes, and hence the digest, are known only after reading.
struct OpenedModel {
  ModelConfig config;
  std::unique_ptr<const TensorSource> weights;
};

// INVALID_ARGUMENT, naming a tensor: weights are fp16, and `policy` does not allow rounding them.
absl::Status CheckRounding(const TensorSource& weights, const LoadPolicy& policy);

// What an operator should know about an opened model, one sentence each: settings in its files that
// are not applied, weights that are rounded to bf16.
std::vector<std::string> Warnings(const ModelConfig& config, const TensorSource& weights);

// FAILED_PRECONDITION, naming both digests: `expected` is not empty and differs from `digest`, the
// digest of the weights.
absl::Status CheckDigest(const std::string& digest, const std::string& expected);

// Returns the digest of the weights of `plan` from the digests of its tensors. Errors: those of
// CheckTiedTensors and CheckDigest.
absl::StatusOr<std::string> CheckDigests(CheckpointDigests digests, const TensorPlan& plan,
                                         const std::string& expected_digest);

// OK if `next` may replace weights of `config`. INVALID_ARGUMENT, naming the field: a field differs
// that can change a bit or a token (ModelConfig::Settings). Tensors may have other dtypes, since
// every tensor is rounded to bf16.
absl::Status CheckReplacement(const OpenedModel& next, const ModelConfig& config);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_OPENED_MODEL_H_
