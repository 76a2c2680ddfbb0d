// From an update's source to a packed version.
#include "kernels/model/prepare_weights.h"

#include "absl/strings/str_cat.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/awaited_source.h"
#include "kernels/model/pack_from_device.h"
#include "kernels/model/pack_model.h"
#include "kernels/model/sent_weights.h"

namespace isobit {
namespace {

absl::StatusOr<std::string> Pack(const TensorSource& source, const WeightUpdate& update,
                                 const LoadPolicy& policy, WeightStore& store) {
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.opened"));
  const AwaitedSource weights(source, update.is_abandoned);
  ISOBIT_ASSIGN_OR_RETURN(std::string digest, PackModel(weights, update.expected_digest, store,
                                                        policy.allow_nonfinite));
  // A sender says at the end what it has sent.
  if (update.stream != nullptr) {
    ISOBIT_RETURN_IF_ERROR(CheckDigest(digest, update.stream->expected_digest()));
  }
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.verified"));
  return digest;
}

// Weights that other processes hold in GPU memory, and share or send.
absl::StatusOr<std::string> PackHeld(const StreamedSource& stream, const WeightUpdate& update,
                                     const LoadPolicy& policy, WeightStore& store) {
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.opened"));
  const auto check = [&]() -> absl::Status {
    ISOBIT_RETURN_IF_ERROR(CheckAwaited(update.is_abandoned, "weight update"));
    return stream.failure();
  };
  const WeightBlocks& blocks = *stream.blocks();
  const auto make_source =
      [&](size_t rank, size_t num_ranks,
          DevicePacker& packer) -> absl::StatusOr<std::unique_ptr<SliceSource>> {
    if (!blocks.senders) return ReadBlocks(stream.tensors(), blocks);
    if (blocks.senders->group_ids.size() != num_ranks) {
      return absl::InvalidArgumentError(
          absl::StrCat("weights by NCCL: ", blocks.senders->group_ids.size(), " groups, expected ",
                       num_ranks, ", one for each rank that packs"));
    }
    return ReceiveWeights(stream.tensors(), blocks,
                          {.id = blocks.senders->group_ids[rank],
                           .num_senders = blocks.senders->num_senders,
                           .has_joined = blocks.senders->has_joined,
                           .nccl_version = blocks.senders->nccl_version,
                           .max_silence = stream.max_silence(),
                           .check = check},
                          packer);
  };
  ISOBIT_ASSIGN_OR_RETURN(std::string digest, PackFromDevice(stream.tensors(), make_source, check,
                                                             store, policy.allow_nonfinite));
  ISOBIT_RETURN_IF_ERROR(stream.CheckUnchanged());
  ISOBIT_RETURN_IF_ERROR(CheckDigest(digest, stream.expected_digest()));
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.verified"));
  return digest;
}

absl::StatusOr<std::string> Prepare(const ModelOrigin& origin, const WeightUpdate& update,
                                    const ModelConfig& config, WeightStore& store) {
  if (update.stream != nullptr && update.stream->blocks() != nullptr) {
    return PackHeld(*update.stream, update, origin.policy, store);
  }
  if (update.stream != nullptr) return Pack(*update.stream, update, origin.policy, store);
  ISOBIT_ASSIGN_OR_RETURN(const OpenedModel model, OpenModelAs(origin.format, origin.root,
                                                               update.model_path, origin.policy));
  ISOBIT_RETURN_IF_ERROR(CheckReplacement(model, config));
  return Pack(*model.weights, update, origin.policy, store);
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
