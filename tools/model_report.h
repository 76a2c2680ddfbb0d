// The report of `isobit-model inspect` about a model directory.
#ifndef ISOBIT_TOOLS_MODEL_REPORT_H_
#define ISOBIT_TOOLS_MODEL_REPORT_H_

#include <string>

#include "common/checkpoint/model_config.h"
#include "common/checkpoint/tensor_source.h"
#include "common/checkpoint/weight_reader.h"

namespace isobit {

// Shape, digests and fingerprints; a line for each tensor (dtype, shape, digest, name); and each
// rank's share at each tensor-parallel size. stored_digest: StoredDigest of `checkpoint`. For
// people: the format may change.
std::string ReportModel(const ModelConfig& config, const TensorSource& checkpoint,
                        const CheckpointDigests& digests, const std::string& stored_digest);

}  // namespace isobit

#endif  // ISOBIT_TOOLS_MODEL_REPORT_H_
