// What a model config determines for its numerics: the rotary table, the names of the modes and the
// fingerprint.
#ifndef ISOBIT_KERNELS_MODEL_NUMERICS_H_
#define ISOBIT_KERNELS_MODEL_NUMERICS_H_

#include <cstdint>
#include <string>

#include "common/checkpoint/model_config.h"
#include "common/config/numerics_mode.h"
#include "kernels/contract/rope.h"

namespace isobit {

// 64 hex digits. Equal fingerprints and weights promise equal bits (contract/fingerprint.h).
std::string FingerprintOf(const ModelConfig& config, NumericsMode mode);

contract::RopeScaling RopeScalingOf(const ModelConfig& config);

// The table for positions [0, positions).
contract::RopeTable RopeTableOf(const ModelConfig& config, int64_t positions);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_NUMERICS_H_
