// Where the two services first compute other bits for a sequence, and why: the RPC Localise.
//
// Both compute the sequence op by op (Probe). The inputs of the first op that differs are the
// results of the ops before it, which are equal: so its weights differ, or its arithmetic does. If
// no op differs, the scorer says what logprobs follow from the ops under each side's parameters,
// and whoever said something else is at fault.
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

// INVALID_ARGUMENT: no tokens, or a side with another number of logprobs than completion tokens.
absl::Status ValidateLocaliseRequest(const v1::LocaliseRequest& request);

// Answers a valid request. Blocks for several calls of both services, which end when `call` does.
// Errors: theirs, naming the side; ABORTED: their weights or arithmetic changed meanwhile.
absl::StatusOr<v1::LocaliseResponse> Localise(const Upstreams& upstreams,
                                              const v1::LocaliseRequest& request,
                                              const grpc::CallbackServerContext& call);

// Logprobs of one completion, of sides whose ops are all equal.
struct LogprobEvidence {
  std::vector<float> rollout_said, scorer_said;          // empty: not known
  std::vector<float> rollout_parameters_give;            // what follows from the ops
  std::vector<float> scorer_parameters_give, raw_gives;  // likewise; raw: without parameters
};
struct LogprobVerdict {
  v1::DifferenceCause cause;
  std::optional<uint32_t> position{};
  std::string explanation;
};
LogprobVerdict JudgeLogprobs(const LogprobEvidence& evidence);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_LOCALISE_H_
