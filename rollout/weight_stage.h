// Brings other weights beside those that serve: read, checked in full, packed for every rank. The
// switch is the engine's.
#ifndef ISOBIT_ROLLOUT_WEIGHT_STAGE_H_
#define ISOBIT_ROLLOUT_WEIGHT_STAGE_H_

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "common/checkpoint/opened_model.h"
#include "kernels/model/load_format.h"
#include "rollout/model_runner.h"

namespace isobit {

// Stages the model directory `model_path`, relative to `model_root`, to replace weights of
// `config`. `expected_digest`: empty skips that check. The digest is that of the bytes that were
// packed, whatever happens to the files meanwhile. `is_abandoned`: as AwaitedSource's. Errors name
// path and tensor: those of OpenModelAs, CheckReplacement, AwaitedSource and StageBlocks.
absl::StatusOr<StagedWeights> StageWeights(
    LoadFormat format, const LoadPolicy& policy, const std::string& model_root,
    const std::string& model_path, const std::string& expected_digest, const ModelConfig& config,
    const std::function<bool()>& is_abandoned, const ModelRunner& runner);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_WEIGHT_STAGE_H_
