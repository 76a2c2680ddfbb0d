// What `isobit-model inspect` says of a model directory.
#ifndef ISOBIT_TOOLS_MODEL_REPORT_H_
#define ISOBIT_TOOLS_MODEL_REPORT_H_

#include <string>

#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/model_config.h"

namespace isobit {

// Shape, digest and fingerprints; a line for each tensor (dtype, shape, digest, name); and what
// each rank owns at each tensor-parallel size. For people: the form may change.
std::string ReportModel(const ModelConfig& config, const Checkpoint& checkpoint);

}  // namespace isobit

#endif  // ISOBIT_TOOLS_MODEL_REPORT_H_
