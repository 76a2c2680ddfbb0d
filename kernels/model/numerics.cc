// Fingerprint and rotary table of a model. See numerics.h.
#include "kernels/model/numerics.h"

#include "kernels/contract/fingerprint.h"

namespace isobit {

std::string FingerprintOf(const ModelConfig& config, NumericsMode mode) {
  return contract::Fingerprint(NumericsModeName(mode), config.CanonicalString());
}

contract::RopeScaling RopeScalingOf(const ModelConfig& config) {
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
      break;
    case RopeType::kYarn:
      scaling.type = contract::RopeScaling::Type::kYarn;
      break;
  }
  scaling.factor = from.factor;
  scaling.original_max_positions = from.original_max_position_embeddings;
  scaling.low_freq_factor = from.low_freq_factor;
  scaling.high_freq_factor = from.high_freq_factor;
  scaling.beta_fast = from.beta_fast;
  scaling.beta_slow = from.beta_slow;
  scaling.truncate = from.truncate;
  scaling.attention_factor = from.attention_factor;
  scaling.mscale = from.mscale;
  scaling.mscale_all_dim = from.mscale_all_dim;
  return scaling;
}

contract::RopeTable RopeTableOf(const ModelConfig& config, int64_t positions) {
  return contract::MakeRopeTable(positions, config.head_dim, config.rope_theta,
                                 RopeScalingOf(config));
}

}  // namespace isobit
