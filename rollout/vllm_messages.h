// The messages of vllm.grpc.engine.VllmEngine as those of isobit.v1, and back. What they mean:
// proto/vllm/grpc/engine/vllm_engine.proto. Values are checked where isobit.v1's are.
#ifndef ISOBIT_ROLLOUT_VLLM_MESSAGES_H_
#define ISOBIT_ROLLOUT_VLLM_MESSAGES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "isobit/v1/rollout.pb.h"
#include "rollout/engine.h"
#include "vllm/grpc/engine/vllm_engine.pb.h"

namespace isobit {

namespace vllm_wire = ::vllm::grpc::engine;

// The request of isobit.v1 that does what `proto` asks for. INVALID_ARGUMENT, naming the field: it
// asks for what this service does not have; a field that is not known here, by its number; a value
// that isobit.v1 cannot express; or, without `stream`, an answer that may not fit into one message.
// context_length: tokens of one sequence.
absl::StatusOr<v1::GenerateRequest> ReadVllmRequest(const vllm_wire::GenerateRequest& proto,
                                                    uint32_t context_length);

// An error of isobit.v1 with the names that fields have here.
absl::Status WithVllmNames(const absl::Status& status);

// The tokens of a chunk, added to what `complete` has. `logprobs`: whether they are wanted.
void AddTokens(const v1::TokenLogprobs& tokens, bool logprobs,
               vllm_wire::GenerateComplete& complete);
// The end of a sample, beside its tokens.
void SetEnd(const v1::GenerateComplete& end, vllm_wire::GenerateComplete& complete);

// How the service names its model.
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

#endif  // ISOBIT_ROLLOUT_VLLM_MESSAGES_H_
