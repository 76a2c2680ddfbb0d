// The RPC Localise: where the two services first compute different bits for a sequence, and why.
//
// Both services compute the sequence op by op (Probe). The inputs of the first op that differs are
// results of earlier ops, hence equal: so its weights differ, or its arithmetic does. If no op
// differs, the scorer computes which logprobs follow from the ops under each side's parameters; the
// side that reported other logprobs is at fault.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_LOCALISE_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_LOCALISE_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "isobit/v1/comparator.pb.h"
#include "trainer_bridge/comparator/upstreams.h"

namespace isobit {

// INVALID_ARGUMENT: there are no tokens, or a side has not one logprob per completion token.
absl::Status ValidateLocaliseRequest(const v1::LocaliseRequest& request);

// Answers a valid request. Blocks during several calls to both services, which end if `call` does.
// Errors: theirs, naming the side; ABORTED: their weights or arithmetic changed meanwhile.
absl::StatusOr<v1::LocaliseResponse> Localise(const Upstreams& upstreams,
                                              const v1::LocaliseRequest& request,
                                              const grpc::CallbackServerContext& call);

// Logprobs of one completion, when all ops of the two sides are equal.
struct LogprobEvidence {
  std::vector<float> rollout_said, scorer_said;          // as reported; empty: unknown
  std::vector<float> rollout_parameters_give;            // as they follow from the ops
  std::vector<float> scorer_parameters_give, raw_gives;  // likewise; raw: no parameters
};
struct LogprobVerdict {
  v1::DifferenceCause cause;
  std::optional<uint32_t> position{};
  std::string explanation;
};
LogprobVerdict JudgeLogprobs(const LogprobEvidence& evidence);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_LOCALISE_H_
