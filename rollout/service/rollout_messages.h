// Converts between the rollout's wire messages and the engine's types. Values are not checked
// against the model here, but by ValidateRequest.
#ifndef ISOBIT_ROLLOUT_SERVICE_ROLLOUT_MESSAGES_H_
#define ISOBIT_ROLLOUT_SERVICE_ROLLOUT_MESSAGES_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "isobit/v1/rollout.pb.h"
#include "rollout/engine/engine.h"
#include "rollout/schedule/request.h"

namespace isobit {

// Fills all of `request` but its id. INVALID_ARGUMENT: the logprob mode is unknown.
absl::Status ReadGenerateRequest(const v1::GenerateRequest& proto, GenerationRequest& request);

// INVALID_ARGUMENT: the mode is unknown.
absl::StatusOr<PauseMode> PauseModeFromProto(v1::PauseMode mode);
struct SleepCall {
  SleepLevel level = SleepLevel::kKvCache;
  PauseMode mode = PauseMode::kAbort;
};
absl::StatusOr<SleepCall> ReadSleepRequest(const v1::SleepRequest& proto);
absl::StatusOr<WeightUpdate> ReadUpdateWeightsRequest(const v1::UpdateWeightsRequest& proto);

v1::PauseGenerationResponse PauseResponse(const PauseResult& result);
v1::SleepResponse SleepResponse(const SleepResult& result);
v1::UpdateWeightsResponse UpdateWeightsResponse(const WeightUpdateResult& result);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_ROLLOUT_MESSAGES_H_
