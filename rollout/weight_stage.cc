// Reads, checks and packs new weights. See weight_stage.h.
#include "rollout/weight_stage.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

absl::StatusOr<OpenedModel> OpenReplacement(LoadFormat format, const LoadPolicy& policy,
                                            const std::string& model_root,
                                            const std::string& model_path,
                                            const std::string& expected_digest,
                                            const ModelConfig& config,
                                            const std::map<std::string, DType>& dtypes) {
  ISOBIT_ASSIGN_OR_RETURN(OpenedModel model,
                          OpenModelAs(format, model_root, model_path, expected_digest, policy));
  ISOBIT_RETURN_IF_ERROR(CheckReplacement(model, config, dtypes));
  return model;
}

}  // namespace

absl::StatusOr<StagedWeights> StageWeights(
    LoadFormat format, const LoadPolicy& policy, const std::string& model_root,
    const std::string& model_path, const std::string& expected_digest, const ModelConfig& config,
    const std::map<std::string, DType>& dtypes, const ModelRunner& runner) {
  ISOBIT_LOG(Info) << "reading and checking the weights in " << model_path;
  absl::StatusOr<OpenedModel> model =
      OpenReplacement(format, policy, model_root, model_path, expected_digest, config, dtypes);
  if (!model.ok()) {
    return absl::Status(model.status().code(), absl::StrCat("model_path \"", model_path,
                                                            "\": ", model.status().message()));
  }
  ISOBIT_ASSIGN_OR_RETURN(StagedRanks ranks, runner.Stage(model->checkpoint));
  return StagedWeights{.ranks = std::move(ranks),
                       .digest = std::move(model->digests.checkpoint),
                       .dtypes = DTypesOf(model->checkpoint)};
}

}  // namespace isobit
