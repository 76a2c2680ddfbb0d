// What the engine does between steps: ends requests, pauses, switches weights. See engine.h.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/model/stage_weights.h"
#include "rollout/engine.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void Engine::Cancel(uint64_t ticket, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  const auto it = requests_.find(ticket);
  if (it == requests_.end()) return;
  it->second->abort_reason = reason;
  attention_ = true;
  changed_.notify_all();
}

std::vector<std::string> Engine::Abort(absl::Span<const std::string> ids,
                                       const std::optional<std::string>& client) {
  std::vector<std::string> aborted;
  const std::lock_guard lock(mutex_);
  for (const std::string& id : ids) {
    const auto ticket = tickets_.find(id);
    if (ticket == tickets_.end()) continue;
    Request& request = *requests_.at(ticket->second);
    if (client && request.client != *client) continue;
    if (request.abort_reason.empty()) aborted.push_back(id);
    request.abort_reason = "aborted by a client";
  }
  attention_ = true;
  changed_.notify_all();
  return aborted;
}

std::vector<std::string> Engine::AbortAll() {
  std::vector<std::string> ids;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [ticket, request] : requests_) ids.push_back(request->id);
  }
  return Abort(ids);
}

void Engine::Wake() {
  const std::lock_guard lock(mutex_);
  attention_ = true;
  changed_.notify_all();
}

void Engine::Pause(PauseMode mode, Reply<PauseResult> reply, IsAbandoned is_abandoned) {
  absl::Status available;
  {
    const std::lock_guard lock(mutex_);
    available = Available();
    if (available.ok()) {
      pauses_.push_back({mode, std::move(reply), std::move(is_abandoned)});
      attention_ = true;
      changed_.notify_all();
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
    undone.swap(pauses_);
    paused_ = false;
    num_resumed = requests_.size();
    HoldNewcomersWhileWaiting();
    attention_ = true;
    changed_.notify_all();
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
    refused = Available();
    if (refused.ok()) {
      refused = switch_.Begin(update, version_ != nullptr ? *version_ : WeightVersion{}).status();
    }
    if (refused.ok()) {
      update_reply_ = std::move(reply);
      if (stager_.joinable()) stager_.join();  // it has nothing left to do
      stager_ = std::thread([this, update = std::move(update)] {
        absl::StatusOr<StagedUpdate> staged = Stage(update);
        const std::lock_guard stager_lock(mutex_);
        switch_.SetStaged(std::move(staged));
        attention_ = true;
        changed_.notify_all();
      });
      return;
    }
  }
  reply(refused);
}

absl::StatusOr<StagedUpdate> Engine::Stage(const WeightUpdate& update) {
  ResidentStore store = runner_->NewStore();
  ISOBIT_ASSIGN_OR_RETURN(
      std::string digest,
      StageWeights({options_.model_root, options_.load_format, options_.load_policy}, update,
                   config_, store));
  auto blocks = std::make_shared<const std::vector<StagedBlocks>>(store.Take());
  return StagedUpdate{std::move(digest), [this, blocks = std::move(blocks),
                                          mode = update.mode](WeightUpdateResult& result) {
                        return SwapWeights(*blocks, mode, result);
                      }};
}

bool Engine::is_staging() {
  const std::lock_guard lock(mutex_);
  return switch_.is_staging();
}

void Engine::BeginDrain() {
  const std::lock_guard lock(mutex_);
  draining_ = true;
  attention_ = true;
  changed_.notify_all();
}

void Engine::Settle() {
  {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    if (attention_ || now >= next_expiry_) EndRequests(now);
    attention_ = hold_launches_ = false;
    SettlePauses();
    SettleUpdate();
    if (draining_ && paused_) AbortRequests("the server stops while generation is paused");
    HoldNewcomersWhileWaiting();
  }
  retired_.reset();
  emitter_.Emit(outbox_);
}

void Engine::EndRequests(Clock::time_point now) {
  next_expiry_ = Clock::time_point::max();
  for (auto it = requests_.begin(); it != requests_.end();) {
    Request& request = *it->second;
    if (now >= request.expiry) request.abort_reason = "timeout_ms has passed";
    if (request.abort_reason.empty()) {
      next_expiry_ = std::min(next_expiry_, request.expiry);
      ++it;
    } else {
      it = AbortRequest(it, request.abort_reason);
    }
  }
}

void Engine::SettlePauses() {
  std::vector<PendingPause> waiting;
  for (PendingPause& pause : std::exchange(pauses_, {})) {
    absl::StatusOr<PauseResult> result = PauseResult{};
    const absl::Status awaited = CheckAwaited(pause.is_abandoned, "pause");
    const bool waits = pause.mode == PauseMode::kWait && awaited.ok();
    if (waits) scheduler_.HoldNewcomers();
    if (!failure_.ok()) {
      result = Available();
    } else if (!awaited.ok()) {
      result = awaited;
    } else if ((waits && scheduler_.HasWork() && !paused_) || !IsQuiet()) {
      waiting.push_back(std::move(pause));
      continue;
    } else if (pause.mode == PauseMode::kAbort) {
      result->num_aborted = AbortRequests("generation was paused");
    } else if (waits) {
      if (scheduler_.HasWork()) {
        result = absl::FailedPreconditionError(absl::StrCat(
            "generation is paused with ", requests_.size(), " requests kept: they cannot finish"));
      }
    }
    if (result.ok()) {
      paused_ = true;
      result->num_kept = requests_.size();
    }
    outbox_.push_back([reply = std::move(pause.reply), result] { reply(result); });
  }
  pauses_ = std::move(waiting);
}

void Engine::SettleUpdate() {
  retired_ = switch_.Settle(Available(), [this](const WeightUpdate& update, WeightUpdateResult&) {
    return QuiesceFor(update);
  });
  if (!retired_) return;
  outbox_.push_back([reply = std::exchange(update_reply_, nullptr), result = retired_->result] {
    reply(result);
  });
}

absl::StatusOr<bool> Engine::QuiesceFor(const WeightUpdate& update) {
  if (update.mode == InFlightMode::kWait) {
    scheduler_.HoldNewcomers();
    if (scheduler_.HasWork() && !paused_) return false;
    if (scheduler_.HasWork()) {
      return absl::FailedPreconditionError(
          "in_flight_mode: WAIT needs requests that can finish, but generation is paused");
    }
  }
  return IsQuiet();
}

bool Engine::IsQuiet() {
  if (num_in_flight() > 0) hold_launches_ = true;
  return num_in_flight() == 0;
}

// INVARIANT: afterwards no sequence holds keys of the old weights
// (EngineUpdateTest.UpdateRecomputeKv*).
absl::Status Engine::SwapWeights(const std::vector<StagedBlocks>& staged, InFlightMode mode,
                                 WeightUpdateResult& result) {
  if (mode == InFlightMode::kAbort) {
    result.num_aborted = AbortRequests("the weights were updated");
  } else {
    for (const auto& [ticket, request] : requests_) {
      result.num_recomputed +=
          std::any_of(request->samples.begin(), request->samples.end(),
                      [](const auto& sequence) { return sequence->num_cached > 0; });
    }
    scheduler_.PreemptAll();
  }
  const absl::Status served = runner_->Serve(staged);
  if (served.ok()) {
    version_ = std::make_shared<const WeightVersion>(result.current);
  } else {
    Fail(served);
  }
  return served;
}

void Engine::HoldNewcomersWhileWaiting() {
  if (paused_ || !pauses_.empty() || switch_.is_waiting()) {
    scheduler_.HoldNewcomers();
  } else {
    scheduler_.ReleaseNewcomers();
  }
}

Engine::Requests::iterator Engine::AbortRequest(Requests::iterator it, const std::string& reason) {
  for (const auto& sequence : it->second->samples) {
    if (sequence->state == Sequence::State::kFinished) continue;
    EndSequence(*sequence, {.reason = FinishReason::kAbort, .abort_reason = reason});
  }
  return Close(it, absl::OkStatus());
}

size_t Engine::AbortRequests(const std::string& reason) {
  const size_t num_aborted = requests_.size();
  for (auto it = requests_.begin(); it != requests_.end();) it = AbortRequest(it, reason);
  return num_aborted;
}

}  // namespace isobit
