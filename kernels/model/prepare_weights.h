// Prepares a weight update, in the same way for every service: opens a model directory and compares
// it with the serving model, or takes a stream; then reads, hashes and packs it. Stops if the
// caller of the update no longer waits for it.
#ifndef ISOBIT_KERNELS_MODEL_PREPARE_WEIGHTS_H_
#define ISOBIT_KERNELS_MODEL_PREPARE_WEIGHTS_H_

#include <string>

#include "absl/status/statusor.h"
#include "common/checkpoint/load_policy.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/weight_switch.h"
#include "kernels/model/load_format.h"
#include "kernels/model/weight_store.h"

namespace isobit {

// Where a service finds models, and how it opens them.
struct ModelOrigin {
  std::string root;  // models lie below it
  LoadFormat format = LoadFormat::kAuto;
  LoadPolicy policy{};
};

// Packs the model directory or the stream of `update` into `store`, to
// replace weights of `config`, and returns the digest of the packed bytes,
// whatever happens to the files meanwhile. Errors name path and tensor: those
// of OpenModelAs, CheckReplacement, AwaitedSource, PackModel and the stream.
absl::StatusOr<std::string> PrepareWeights(const ModelOrigin& origin, const WeightUpdate& update,
                                           const ModelConfig& config, WeightStore& store);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_PREPARE_WEIGHTS_H_
