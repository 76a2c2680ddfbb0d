// Pauses, drains and weight updates of the engine. See engine.h.
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/model/prepare_weights.h"
#include "rollout/engine.h"

namespace isobit {

void Engine::Wake() {
  const std::lock_guard lock(mutex_);
  WakeThread();
}

void Engine::Pause(PauseMode mode, Reply<PauseResult> reply, IsAbandoned is_abandoned) {
  absl::Status available;
  {
    const std::lock_guard lock(mutex_);
    available = gate_.Available();
    if (available.ok()) {
      gate_.Pause({mode, std::move(reply), std::move(is_abandoned)});
      WakeThread();
      return;
    }
  }
  reply(available);
}

size_t Engine::Continue() {
  std::vector<PendingPause> undone;
  size_t num_resumed = 0;
  {
    const std::lock_guard lock(mutex_);
    undone = gate_.Continue();
    num_resumed = table_.size();
    HoldNewcomersWhileWaiting();
    WakeThread();
  }
  for (const PendingPause& pause : undone) {
    pause.reply(absl::AbortedError("generation was continued before it had paused"));
  }
  return num_resumed;
}

void Engine::UpdateWeights(WeightUpdate update, Reply<WeightUpdateResult> reply) {
  absl::Status refused;
  {
    const std::lock_guard lock(mutex_);
    refused = gate_.Available();
    if (refused.ok()) {
      refused = switch_.Begin(update, version_ != nullptr ? *version_ : WeightVersion{}).status();
    }
    if (refused.ok()) {
      update_reply_ = std::move(reply);
      if (preparer_.joinable()) preparer_.join();  // it has nothing left to do
      preparer_ = std::thread([this, update = std::move(update)] {
        absl::StatusOr<PreparedUpdate> prepared = Prepare(update);
        const std::lock_guard engine_lock(mutex_);
        switch_.SetPrepared(std::move(prepared));
        WakeThread();
      });
      return;
    }
  }
  reply(refused);
}

absl::StatusOr<PreparedUpdate> Engine::Prepare(const WeightUpdate& update) {
  ResidentStore store = runner_->NewStore();
  ISOBIT_ASSIGN_OR_RETURN(
      std::string digest,
      PrepareWeights({options_.model_root, options_.load_format, options_.load_policy}, update,
                     config_, store));
  auto blocks = std::make_shared<const std::vector<PreparedBlocks>>(store.Take());
  return PreparedUpdate{std::move(digest), [this, blocks = std::move(blocks),
                                            mode = update.mode](WeightUpdateResult& result) {
                          return SwapWeights(*blocks, mode, result);
                        }};
}

bool Engine::is_preparing() {
  const std::lock_guard lock(mutex_);
  return switch_.is_preparing();
}

void Engine::BeginDrain() {
  const std::lock_guard lock(mutex_);
  gate_.Drain();
  WakeThread();
}

void Engine::SettleUpdate() {
  retired_ = switch_.Settle(
      gate_.Available(),
      [this](const WeightUpdate& update, WeightUpdateResult&) { return QuiesceFor(update); });
  if (!retired_) return;
  outbox_.push_back([reply = std::exchange(update_reply_, nullptr), result = retired_->result] {
    reply(result);
  });
}

absl::StatusOr<bool> Engine::QuiesceFor(const WeightUpdate& update) {
  if (update.mode == InFlightMode::kWait) {
    table_.scheduler().HoldNewcomers();
    const bool has_work = table_.scheduler().HasWork();
    if (has_work && !gate_.is_paused()) return false;
    if (has_work) {
      return absl::FailedPreconditionError(
          "in_flight_mode: WAIT needs requests that can finish, but generation is paused");
    }
  }
  return IsQuiet();
}

// INVARIANT: afterwards no sequence holds or finds keys of the old weights
// (EngineUpdateTest.UpdateRecomputeKv*, EngineSharingTest.AnUpdateForgetsThePrefixes).
absl::Status Engine::SwapWeights(const std::vector<PreparedBlocks>& prepared, InFlightMode mode,
                                 WeightUpdateResult& result) {
  if (mode == InFlightMode::kAbort) {
    result.num_aborted = table_.AbortAll("the weights were updated");
  } else {
    result.num_recomputed = table_.num_with_cache();
    table_.scheduler().PreemptAll();
  }
  table_.ForgetPrefixes();
  const absl::Status served = runner_->Serve(prepared);
  if (served.ok()) {
    version_ = std::make_shared<const WeightVersion>(result.current);
  } else {
    Fail(served);
  }
  return served;
}

void Engine::HoldNewcomersWhileWaiting() {
  gate_.HoldNewcomers(switch_.is_waiting(), table_.scheduler());
}

}  // namespace isobit
