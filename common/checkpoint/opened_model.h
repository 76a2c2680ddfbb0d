// A model directory, opened and checked as a whole, before any of its weights is used.
#ifndef ISOBIT_COMMON_CHECKPOINT_OPENED_MODEL_H_
#define ISOBIT_COMMON_CHECKPOINT_OPENED_MODEL_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/model_config.h"

namespace isobit {

// Names one set of weights.
struct WeightVersion {
  uint64_t id = 0;
  std::string digest;  // CheckpointDigests::checkpoint
};

struct OpenedModel {
  ModelConfig config;
  Checkpoint checkpoint;
  CheckpointDigests digests;
};

// The model in `model_path`, relative to `model_root`, which neither it nor its files may leave. If
// `expected_digest` is not empty, the weights must have it. Reads every byte of them. Errors name
// the file, tensor or field: those of ResolveModelPath, LoadModelConfig, Checkpoint::Open and
// ValidateCheckpoint, CheckRounding, CheckDigest.
absl::StatusOr<OpenedModel> OpenModel(const std::string& model_root, const std::string& model_path,
                                      const std::string& expected_digest,
                                      const LoadPolicy& policy = {});

// INVALID_ARGUMENT, naming a tensor: weights are fp16, and `policy` does not let them be rounded.
absl::Status CheckRounding(const Checkpoint& checkpoint, const LoadPolicy& policy);

// What an operator should know of a model that was opened: fields of its config that were ignored,
// weights that are rounded to bf16. One sentence each.
std::vector<std::string> Warnings(const ModelConfig& config, const Checkpoint& checkpoint);

// FAILED_PRECONDITION: `expected_digest` is not empty, and not the model's.
absl::Status CheckDigest(const OpenedModel& model, const std::string& model_path,
                         const std::string& expected_digest);

// The dtype of each tensor, by name.
std::map<std::string, DType> DTypesOf(const Checkpoint& checkpoint);

// Whether `next` may replace weights of `config` and `dtypes`. INVALID_ARGUMENT, naming the field
// or tensor: any part of the config that can change a bit, or the dtype of a tensor, differs.
absl::Status CheckReplacement(const OpenedModel& next, const ModelConfig& config,
                              const std::map<std::string, DType>& dtypes);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_OPENED_MODEL_H_
