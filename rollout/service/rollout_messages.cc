// Field by field, with an error for each value that the wire allows and the engine does not.
#include "rollout/service/rollout_messages.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/status_macros.h"
#include "common/config/token_ids.h"
#include "common/rpc/sampling_params_proto.h"
#include "common/rpc/server_info.h"

namespace isobit {
namespace {

absl::Status UnknownEnum(absl::string_view field, int value) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": unknown value ", value));
}

absl::StatusOr<bool> IsRaw(v1::LogprobMode mode) {
  switch (mode) {
    case v1::LOGPROB_MODE_UNSPECIFIED:
    case v1::LOGPROB_MODE_PROCESSED:
      return false;
    case v1::LOGPROB_MODE_RAW:
      return true;
    default:
      return UnknownEnum("logprob_mode", mode);
  }
}

absl::StatusOr<bool> IsDeterministic(v1::Determinism determinism) {
  switch (determinism) {
    case v1::DETERMINISM_UNSPECIFIED:
    case v1::DETERMINISM_REQUIRED:
      return true;
    case v1::DETERMINISM_NONE:
      return false;
    default:
      return UnknownEnum("determinism", determinism);
  }
}

absl::StatusOr<InFlightMode> InFlightModeFromProto(v1::InFlightMode mode) {
  switch (mode) {
    case v1::IN_FLIGHT_MODE_UNSPECIFIED:
    case v1::IN_FLIGHT_MODE_ABORT:
      return InFlightMode::kAbort;
    case v1::IN_FLIGHT_MODE_WAIT:
      return InFlightMode::kWait;
    case v1::IN_FLIGHT_MODE_RECOMPUTE_KV:
      return InFlightMode::kRecomputeKv;
    default:
      return UnknownEnum("in_flight_mode", mode);
  }
}

}  // namespace

absl::StatusOr<PauseMode> PauseModeFromProto(v1::PauseMode mode) {
  switch (mode) {
    case v1::PAUSE_MODE_UNSPECIFIED:
    case v1::PAUSE_MODE_ABORT:
      return PauseMode::kAbort;
    case v1::PAUSE_MODE_WAIT:
      return PauseMode::kWait;
    case v1::PAUSE_MODE_KEEP:
      return PauseMode::kKeep;
    default:
      return UnknownEnum("mode", mode);
  }
}

absl::StatusOr<SleepCall> ReadSleepRequest(const v1::SleepRequest& proto) {
  SleepCall call;
  switch (proto.level()) {
    case v1::SLEEP_LEVEL_UNSPECIFIED:
    case v1::SLEEP_LEVEL_KV_CACHE:
      break;
    case v1::SLEEP_LEVEL_KV_CACHE_AND_WEIGHTS:
      call.level = SleepLevel::kKvCacheAndWeights;
      break;
    default:
      return UnknownEnum("level", proto.level());
  }
  ISOBIT_ASSIGN_OR_RETURN(call.mode, PauseModeFromProto(proto.mode()));
  return call;
}

v1::SleepResponse SleepResponse(const SleepResult& result) {
  v1::SleepResponse response;
  response.set_num_aborted(static_cast<uint32_t>(result.paused.num_aborted));
  response.set_num_kept(static_cast<uint32_t>(result.paused.num_kept));
  response.set_released_bytes(result.released_bytes);
  return response;
}

v1::PauseGenerationResponse PauseResponse(const PauseResult& result) {
  v1::PauseGenerationResponse response;
  response.set_num_aborted(static_cast<uint32_t>(result.num_aborted));
  response.set_num_kept(static_cast<uint32_t>(result.num_kept));
  return response;
}

absl::StatusOr<WeightUpdate> ReadUpdateWeightsRequest(const v1::UpdateWeightsRequest& proto) {
  WeightUpdate update{.model_path = proto.model_path(), .expected_digest = proto.expected_digest()};
  ISOBIT_ASSIGN_OR_RETURN(update.mode, InFlightModeFromProto(proto.in_flight_mode()));
  if (proto.has_weight_version()) update.weight_version = proto.weight_version();
  return update;
}

v1::UpdateWeightsResponse UpdateWeightsResponse(const WeightUpdateResult& result) {
  v1::UpdateWeightsResponse response;
  *response.mutable_previous() = WeightVersionToProto(result.previous);
  *response.mutable_current() = WeightVersionToProto(result.current);
  response.set_num_aborted(static_cast<uint32_t>(result.num_aborted));
  response.set_num_recomputed(static_cast<uint32_t>(result.num_recomputed));
  response.set_stage_micros(static_cast<uint64_t>(result.prepare_time.count()));
  response.set_switch_micros(static_cast<uint64_t>(result.switch_time.count()));
  return response;
}

absl::Status ReadGenerateRequest(const v1::GenerateRequest& proto, GenerationRequest& request) {
  ISOBIT_ASSIGN_OR_RETURN(request.raw_logprobs, IsRaw(proto.logprob_mode()));
  ISOBIT_ASSIGN_OR_RETURN(request.deterministic, IsDeterministic(proto.determinism()));
  request.prompt = TokenIdsFromWire(proto.prompt_token_ids());
  request.sampling = SamplingParamsFromProto(proto.sampling());
  request.draft_tokens = TokenIdsFromWire(proto.draft_token_ids());
  request.draft_lengths.assign(proto.draft_lengths().begin(), proto.draft_lengths().end());
  request.speculate = !proto.has_speculation() || proto.speculation();
  if (proto.has_timeout_ms()) {
    constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
    request.timeout = std::chrono::milliseconds(std::min(proto.timeout_ms(), kMax));
  }
  return absl::OkStatus();
}

}  // namespace isobit
