// See prepare_weights.h.
#include "kernels/model/prepare_weights.h"

#include "absl/strings/str_cat.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/awaited_source.h"
#include "kernels/model/pack_from_device.h"
#include "kernels/model/pack_model.h"

namespace isobit {
namespace {

absl::StatusOr<std::string> Pack(const TensorSource& source, const WeightUpdate& update,
                                 WeightStore& store) {
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.opened"));
  const AwaitedSource weights(source, update.is_abandoned);
  ISOBIT_ASSIGN_OR_RETURN(std::string digest, PackModel(weights, update.expected_digest, store));
  // A sender says at the end what it has sent.
  if (update.stream != nullptr) {
    ISOBIT_RETURN_IF_ERROR(CheckDigest(digest, update.stream->expected_digest()));
  }
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.verified"));
  return digest;
}

// Weights in GPU memory of other processes.
absl::StatusOr<std::string> PackForeign(const StreamedSource& stream, const WeightUpdate& update,
                                        WeightStore& store) {
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.opened"));
  const auto make_source = [&](size_t /*rank*/, DevicePacker& packer) {
    return MapForeignWeights(stream.tensors(), *stream.blocks(), packer);
  };
  const auto check = [&]() -> absl::Status {
    ISOBIT_RETURN_IF_ERROR(CheckAwaited(update.is_abandoned, "weight update"));
    return stream.failure();
  };
  ISOBIT_ASSIGN_OR_RETURN(std::string digest,
                          PackFromDevice(stream.tensors(), make_source, check, store));
  ISOBIT_RETURN_IF_ERROR(stream.CheckUnchanged());
  ISOBIT_RETURN_IF_ERROR(CheckDigest(digest, stream.expected_digest()));
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.verified"));
  return digest;
}

absl::StatusOr<std::string> Prepare(const ModelOrigin& origin, const WeightUpdate& update,
                                    const ModelConfig& config, WeightStore& store) {
  if (update.stream != nullptr && update.stream->blocks() != nullptr) {
    return PackForeign(*update.stream, update, store);
  }
  if (update.stream != nullptr) return Pack(*update.stream, update, store);
  ISOBIT_ASSIGN_OR_RETURN(const OpenedModel model, OpenModelAs(origin.format, origin.root,
                                                               update.model_path, origin.policy));
  ISOBIT_RETURN_IF_ERROR(CheckReplacement(model, config));
  return Pack(*model.weights, update, store);
}

}  // namespace

absl::StatusOr<std::string> PrepareWeights(const ModelOrigin& origin, const WeightUpdate& update,
                                           const ModelConfig& config, WeightStore& store) {
  const std::string what = update.stream != nullptr
                               ? "weights by stream"
                               : absl::StrCat("model_path \"", update.model_path, "\"");
  ISOBIT_LOG(Info) << "reading and packing: " << what;
  absl::StatusOr<std::string> digest = Prepare(origin, update, config, store);
  if (digest.ok()) return digest;
  return absl::Status(digest.status().code(), absl::StrCat(what, ": ", digest.status().message()));
}

}  // namespace isobit
