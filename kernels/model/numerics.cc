// Fingerprint and rotary table of a model. See numerics.h.
#include "kernels/model/numerics.h"

#include "kernels/contract/fingerprint.h"

namespace isobit {

std::string FingerprintOf(const ModelConfig& config, NumericsMode mode) {
  return contract::Fingerprint(NumericsModeName(mode), config.CanonicalString());
}

contract::RopeTable RopeTableOf(const ModelConfig& config, int64_t positions) {
  const RopeScaling& from = config.rope_scaling;
  contract::RopeScaling scaling;
  switch (from.type) {
    case RopeType::kDefault:
      break;
    case RopeType::kLinear:
      scaling.type = contract::RopeScaling::Type::kLinear;
      break;
    case RopeType::kLlama3:
      scaling.type = contract::RopeScaling::Type::kLlama3;
      scaling.original_max_positions = from.original_max_position_embeddings;
      break;
  }
  scaling.factor = from.factor;
  scaling.low_freq_factor = from.low_freq_factor;
  scaling.high_freq_factor = from.high_freq_factor;
  return contract::MakeRopeTable(positions, config.head_dim, config.rope_theta, scaling);
}

}  // namespace isobit
