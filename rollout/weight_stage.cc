// Reads, checks and packs new weights. See weight_stage.h.
#include "rollout/weight_stage.h"

#include "absl/strings/str_cat.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/awaited_source.h"

namespace isobit {
namespace {

absl::StatusOr<StagedWeights> Stage(LoadFormat format, const LoadPolicy& policy,
                                    const std::string& model_root, const std::string& model_path,
                                    const std::string& expected_digest, const ModelConfig& config,
                                    const std::function<bool()>& is_abandoned,
                                    const ModelRunner& runner) {
  ISOBIT_ASSIGN_OR_RETURN(const OpenedModel model,
                          OpenModelAs(format, model_root, model_path, policy));
  ISOBIT_RETURN_IF_ERROR(CheckReplacement(model, config));
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.opened"));
  const AwaitedSource weights(*model.weights, is_abandoned);
  ISOBIT_ASSIGN_OR_RETURN(StagedWeights staged, runner.Stage(weights, expected_digest));
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.verified"));
  return staged;
}

}  // namespace

absl::StatusOr<StagedWeights> StageWeights(
    LoadFormat format, const LoadPolicy& policy, const std::string& model_root,
    const std::string& model_path, const std::string& expected_digest, const ModelConfig& config,
    const std::function<bool()>& is_abandoned, const ModelRunner& runner) {
  ISOBIT_LOG(Info) << "reading and packing the weights in " << model_path;
  absl::StatusOr<StagedWeights> staged =
      Stage(format, policy, model_root, model_path, expected_digest, config, is_abandoned, runner);
  if (staged.ok()) return staged;
  return absl::Status(staged.status().code(),
                      absl::StrCat("model_path \"", model_path, "\": ", staged.status().message()));
}

}  // namespace isobit
