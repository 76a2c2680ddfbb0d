// Sleeping and waking up: the engine gives memory back to the system, so that a trainer on the same
// GPUs can use it meanwhile. See engine.h.
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "rollout/engine/engine.h"

namespace isobit {

void Engine::Sleep(SleepLevel level, PauseMode mode, Reply<SleepResult> reply,
                   const IsAbandoned& is_abandoned) {
  RunPaused<SleepResult>(
      mode, std::move(reply), is_abandoned,
      [this, level](const PauseResult& paused) { return FallAsleep(level, paused); });
}

void Engine::WakeUp(Reply<size_t> reply, const IsAbandoned& is_abandoned) {
  std::unique_lock lock(mutex_);
  if (!lacks_weights()) {
    lock.unlock();
    return RunPaused<size_t>(PauseMode::kKeep, std::move(reply), is_abandoned,
                             [this](const PauseResult& /*paused*/) { return GetUp(); });
  }
  Reply<WeightUpdateResult> then =
      [this, reply, is_abandoned](const absl::StatusOr<WeightUpdateResult>& loaded) {
        if (!loaded.ok()) return reply(loaded.status());
        WakeUp(reply, is_abandoned);
      };
  const absl::Status begun = ReloadWeights(is_abandoned, then);
  lock.unlock();
  if (!begun.ok()) reply(begun);
}

absl::Status Engine::ReloadWeights(IsAbandoned is_abandoned, Reply<WeightUpdateResult>& reply) {
  if (origin_.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("weights ", version_->id,
                     " were given back and came from no directory: send weights, then wake up"));
  }
  return BeginUpdate({.model_path = origin_,
                      .weight_version = version_->id,
                      .expected_digest = version_->digest,
                      .mode = InFlightMode::kRecomputeKv,
                      .is_abandoned = std::move(is_abandoned)},
                     {.id = version_->id - 1, .digest = ""}, reply);
}

// INVARIANT: no sequence holds or finds keys that were given back
// (EngineSleepTest.KeptRequestsGoOnWithTheSameBits, EngineSleepTest.PrefixesAreForgotten).
absl::StatusOr<SleepResult> Engine::FallAsleep(SleepLevel level, const PauseResult& paused) {
  ISOBIT_RETURN_IF_ERROR(gate_.Available());
  if (!gate_.is_paused()) return absl::AbortedError("generation was continued before it slept");
  if (version_ == nullptr) return absl::FailedPreconditionError("no weights serve yet");
  const bool weights = level == SleepLevel::kKvCacheAndWeights;
  if (weights && (switch_.is_preparing() || switch_.is_waiting())) {
    return absl::AbortedError("a weight update is in progress and needs the weights' memory");
  }
  table_.scheduler().PreemptAll();
  table_.ForgetPrefixes();
  const absl::StatusOr<size_t> released = runner_->Release(weights);
  if (!released.ok()) {
    Fail(released.status());
    return released.status();
  }
  asleep_ = true;
  ISOBIT_LOG(Info) << "asleep: " << *released << " bytes given back";
  return SleepResult{paused, *released};
}

absl::StatusOr<size_t> Engine::GetUp() {
  ISOBIT_RETURN_IF_ERROR(gate_.Available());
  if (lacks_weights()) return absl::AbortedError("the weights were given back once more");
  if (asleep_) {
    ISOBIT_RETURN_IF_ERROR(runner_->RestoreKvCache());
    asleep_ = false;
    ISOBIT_LOG(Info) << "awake";
  }
  return ResumeBetweenSteps(ContinuedBefore());
}

}  // namespace isobit
