// What rollout and scorer both report about themselves: model, numerics, weights.
#ifndef ISOBIT_COMMON_RPC_SERVER_INFO_H_
#define ISOBIT_COMMON_RPC_SERVER_INFO_H_

#include <cstdint>
#include <string>

#include "common/checkpoint/model_config.h"
#include "common/checkpoint/opened_model.h"
#include "common/checkpoint/tensor_plan.h"
#include "common/config/numerics_mode.h"
#include "isobit/v1/types.pb.h"

namespace isobit {

v1::WeightVersion WeightVersionToProto(const WeightVersion& version);

// hex: the result of FingerprintOf (kernels/model/numerics.h) for the same config.
v1::Fingerprint FingerprintToProto(const ModelConfig& config, const std::string& hex,
                                   uint32_t contract_version);

// The fields of ServerInfo that do not change while a service runs. context_length: the most tokens
// of one sequence.
struct ServerIdentity {
  NumericsMode mode = NumericsMode::kTree;
  std::string fingerprint;  // FingerprintOf
  uint32_t contract_version = 0;
  std::string instruction_set;
  uint32_t max_logprobs = 0;
  int64_t context_length = 0;
};
v1::ServerInfo DescribeServer(const TensorPlan& plan, const ServerIdentity& identity);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_SERVER_INFO_H_
