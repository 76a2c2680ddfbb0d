// Reads config.json's rotary fields.
#ifndef ISOBIT_COMMON_CHECKPOINT_ROPE_PARSER_H_
#define ISOBIT_COMMON_CHECKPOINT_ROPE_PARSER_H_

#include "absl/status/status.h"
#include "common/checkpoint/field_reader.h"
#include "common/checkpoint/load_policy.h"
#include "common/checkpoint/model_config.h"

namespace isobit {

// Takes rope_theta, rope_scaling and rope_parameters, and sets config's rope_theta and rope_scaling
// as transformers 5 reads them. Set max_position_embeddings before: under yarn it grows to the
// length that the scaling reaches. INVALID_ARGUMENT: as for ParseModelConfig.
absl::Status ParseRope(FieldReader& reader, const LoadPolicy& policy, ModelConfig& config);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_ROPE_PARSER_H_
