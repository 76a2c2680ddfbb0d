// See prepare_weights.h.
#include "kernels/model/prepare_weights.h"

#include "absl/strings/str_cat.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/awaited_source.h"
#include "kernels/model/pack_model.h"

namespace isobit {
namespace {

absl::StatusOr<std::string> Prepare(const ModelOrigin& origin, const WeightUpdate& update,
                                    const ModelConfig& config, WeightStore& store) {
  ISOBIT_ASSIGN_OR_RETURN(const OpenedModel model, OpenModelAs(origin.format, origin.root,
                                                               update.model_path, origin.policy));
  ISOBIT_RETURN_IF_ERROR(CheckReplacement(model, config));
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.opened"));
  const AwaitedSource weights(*model.weights, update.is_abandoned);
  ISOBIT_ASSIGN_OR_RETURN(std::string digest, PackModel(weights, update.expected_digest, store));
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.verified"));
  return digest;
}

}  // namespace

absl::StatusOr<std::string> PrepareWeights(const ModelOrigin& origin, const WeightUpdate& update,
                                           const ModelConfig& config, WeightStore& store) {
  ISOBIT_LOG(Info) << "reading and packing the weights in " << update.model_path;
  absl::StatusOr<std::string> digest = Prepare(origin, update, config, store);
  if (digest.ok()) return digest;
  return absl::Status(digest.status().code(), absl::StrCat("model_path \"", update.model_path,
                                                           "\": ", digest.status().message()));
}

}  // namespace isobit
