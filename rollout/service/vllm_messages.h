// Converts the messages of vllm.grpc.engine.VllmEngine to those of isobit.v1 and back. They are
// defined in proto/vllm/grpc/engine/vllm_engine.proto. Values are checked where isobit.v1's are.
#ifndef ISOBIT_ROLLOUT_SERVICE_VLLM_MESSAGES_H_
#define ISOBIT_ROLLOUT_SERVICE_VLLM_MESSAGES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "isobit/v1/rollout.pb.h"
#include "rollout/engine/engine.h"
#include "vllm/grpc/engine/vllm_engine.pb.h"

namespace isobit {

namespace vllm_wire = ::vllm::grpc::engine;

// The equivalent request of isobit.v1. INVALID_ARGUMENT, naming the field: this service lacks what
// it asks for; the field is unknown (named by its number); isobit.v1 cannot express the value; or,
// without `stream`, the answer may not fit into one message. context_length: the most tokens of one
// sequence.
absl::StatusOr<v1::GenerateRequest> ReadVllmRequest(const vllm_wire::GenerateRequest& proto,
                                                    uint32_t context_length);

// Replaces the field names in an error of isobit.v1 by those of this protocol.
absl::Status WithVllmNames(const absl::Status& status);

// Appends a chunk's tokens to `complete`. `logprobs`: whether they are wanted.
void AddTokens(const v1::TokenLogprobs& tokens, bool logprobs,
               vllm_wire::GenerateComplete& complete);
// Sets how a sample ended. Does not touch its tokens.
void SetEnd(const v1::GenerateComplete& end, vllm_wire::GenerateComplete& complete);

// The names by which the service answers for its model.
struct VllmModelNames {
  std::string served;     // as the operator named it
  std::string directory;  // absolute
  std::string tokenizer;  // where routers find the tokenizer; empty: in the model's directory
};
vllm_wire::GetModelInfoResponse VllmModelInfo(const VllmModelNames& names,
                                              const ModelConfig& config, uint32_t context_length);

// info: RolloutService's.
vllm_wire::SchedulerLoad VllmLoad(const EngineLoad& load, const v1::RolloutServerInfo& info);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_VLLM_MESSAGES_H_
