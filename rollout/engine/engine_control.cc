// Pauses, drains and weight updates of the engine. See engine.h.
#include <utility>

#include "common/base/status_macros.h"
#include "kernels/model/prepare_weights.h"
#include "rollout/engine/engine.h"

namespace isobit {

void Engine::Wake() {
  const std::lock_guard lock(mutex_);
  WakeThread();
}

void Engine::Pause(PauseMode mode, Reply<PauseResult> reply, IsAbandoned is_abandoned) {
  Enqueue({.mode = mode, .reply = std::move(reply), .is_abandoned = std::move(is_abandoned)});
}

void Engine::Enqueue(PausedJob job) {
  absl::Status available;
  {
    const std::lock_guard lock(mutex_);
    available = gate_.Available();
    if (available.ok()) {
      gate_.Pause(std::move(job));
      WakeThread();
      return;
    }
  }
  job.reply(available);
}

absl::StatusOr<size_t> Engine::Continue() {
  std::vector<PausedJob> undone;
  size_t num_resumed = 0;
  {
    const std::lock_guard lock(mutex_);
    if (asleep_) return absl::FailedPreconditionError("the rollout sleeps: WakeUp continues it");
    undone = Resume(num_resumed);
  }
  for (const PausedJob& pause : undone) pause.reply(ContinuedBefore());
  return num_resumed;
}

std::vector<PausedJob> Engine::Resume(size_t& num_resumed) {
  num_resumed = table_.size();
  std::vector<PausedJob> undone = gate_.Continue();
  HoldNewcomersWhileWaiting();
  WakeThread();
  return undone;
}

size_t Engine::ResumeBetweenSteps(const absl::Status& why) {
  size_t num_resumed = 0;
  for (PausedJob& pause : Resume(num_resumed)) {
    outbox_.push_back([reply = std::move(pause.reply), why] { reply(why); });
  }
  return num_resumed;
}

void Engine::UpdateWeights(WeightUpdate update, Reply<WeightUpdateResult> reply) {
  absl::Status begun;
  {
    const std::lock_guard lock(mutex_);
    begun =
        BeginUpdate(std::move(update), version_ != nullptr ? *version_ : WeightVersion{}, reply);
  }
  if (!begun.ok()) reply(begun);
}

absl::Status Engine::BeginUpdate(WeightUpdate update, const WeightVersion& present,
                                 Reply<WeightUpdateResult>& reply) {
  ISOBIT_RETURN_IF_ERROR(gate_.Available());
  ISOBIT_RETURN_IF_ERROR(switch_.Begin(update, present).status());
  update_reply_ = std::move(reply);
  if (preparer_.joinable()) preparer_.join();  // it has nothing left to do
  preparer_ = std::thread([this, update = std::move(update)] {
    absl::StatusOr<PreparedUpdate> prepared = Prepare(update);
    const std::lock_guard lock(mutex_);
    switch_.SetPrepared(std::move(prepared));
    WakeThread();
  });
  return absl::OkStatus();
}

absl::StatusOr<PreparedUpdate> Engine::Prepare(const WeightUpdate& update) {
  ResidentStore store = runner_->NewStore();
  ISOBIT_ASSIGN_OR_RETURN(
      std::string digest,
      PrepareWeights({options_.model_root, options_.load_format, options_.load_policy}, update,
                     plan_.config, store));
  auto tensors = std::make_shared<const TensorDigests>(store.tensor_digests());
  auto blocks = std::make_shared<const PreparedRanks>(store.Take());
  return PreparedUpdate{
      std::move(digest),
      [this, blocks = std::move(blocks), tensors = std::move(tensors), mode = update.mode,
       origin = update.model_path](WeightUpdateResult& result) {
        result.current.tensors = tensors;
        ISOBIT_RETURN_IF_ERROR(SwapWeights(*blocks, mode, result));
        origin_ = origin;
        return absl::OkStatus();
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
absl::Status Engine::SwapWeights(const PreparedRanks& prepared, InFlightMode mode,
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
