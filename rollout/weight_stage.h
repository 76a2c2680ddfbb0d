// Brings other weights beside those that serve: read, checked in full, packed for every rank. The
// switch is the engine's.
#ifndef ISOBIT_ROLLOUT_WEIGHT_STAGE_H_
#define ISOBIT_ROLLOUT_WEIGHT_STAGE_H_

#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/checkpoint/opened_model.h"
#include "kernels/model/load_format.h"
#include "rollout/model_runner.h"

namespace isobit {

struct StagedWeights {
  StagedRanks ranks;
  std::string digest;  // of the checkpoint, 64 hex digits
  std::map<std::string, DType> dtypes;
};

// Stages the model directory `model_path`, relative to `model_root`, to replace weights of `config`
// and `dtypes` (empty: there are none yet). `expected_digest`: empty skips that check. Errors name
// path and tensor: those of OpenModelAs and CheckReplacement.
absl::StatusOr<StagedWeights> StageWeights(
    LoadFormat format, const LoadPolicy& policy, const std::string& model_root,
    const std::string& model_path, const std::string& expected_digest, const ModelConfig& config,
    const std::map<std::string, DType>& dtypes, const ModelRunner& runner);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_WEIGHT_STAGE_H_
