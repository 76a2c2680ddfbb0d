// What the engine does between steps: ends requests, pauses, switches weights. See engine.h.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "rollout/engine.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;

std::chrono::microseconds Since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start);
}

// CANCELLED if nobody waits for `what`. The engine asks right before it acts, under its lock: what
// is abandoned later has taken effect.
absl::Status CheckAwaited(const IsAbandoned& is_abandoned, absl::string_view what) {
  if (!is_abandoned || !is_abandoned()) return absl::OkStatus();
  return absl::CancelledError(absl::StrCat("the caller of the ", what, " has gone"));
}

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
    const uint64_t present = version_ != nullptr ? version_->id : 0;
    refused = Available();
    if (refused.ok() && update_) refused = absl::AbortedError("another update is in progress");
    if (refused.ok() && update.weight_version && *update.weight_version <= present) {
      refused = absl::InvalidArgumentError(absl::StrCat("weight_version: expected more than ",
                                                        present, ", the present one, got ",
                                                        *update.weight_version));
    }
    if (refused.ok()) {
      if (stager_.joinable()) stager_.join();  // it has nothing left to do
      update_.emplace(PendingUpdate{.update = update, .reply = std::move(reply)});
      stager_ = std::thread([this, update = std::move(update)] {
        const Clock::time_point start = Clock::now();
        auto staged = StageWeights(options_.load_format, options_.load_policy, options_.model_root,
                                   update.model_path, update.expected_digest, config_,
                                   update.is_abandoned, *runner_);
        const std::lock_guard stager_lock(mutex_);
        update_->stage_time = Since(start);
        update_->staged.emplace(std::move(staged));
        attention_ = true;
        changed_.notify_all();
      });
      return;
    }
  }
  reply(refused);
}

bool Engine::is_staging() {
  const std::lock_guard lock(mutex_);
  return update_ && !update_->staged;
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
  retired_.clear();
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
  if (!update_ || !update_->staged) return;
  if (!update_->staged->ok()) return FinishUpdate(update_->staged->status());
  if (const absl::Status available = Available(); !available.ok()) return FinishUpdate(available);
  const absl::Status awaited = CheckAwaited(update_->update.is_abandoned, "weight update");
  if (!awaited.ok()) return FinishUpdate(awaited);
  if (update_->update.mode == InFlightMode::kWait) {
    scheduler_.HoldNewcomers();
    if (scheduler_.HasWork() && !paused_) return;
    if (scheduler_.HasWork()) {
      return FinishUpdate(absl::FailedPreconditionError(
          "in_flight_mode: WAIT needs requests that can finish, but generation is paused"));
    }
  }
  if (!IsQuiet()) return;
  if (const absl::Status failed = Failpoint("weights.switch"); !failed.ok()) {
    return FinishUpdate(failed);
  }
  SwitchWeights();
}

bool Engine::IsQuiet() {
  if (num_in_flight() > 0) hold_launches_ = true;
  return num_in_flight() == 0;
}

// INVARIANT: afterwards no sequence holds keys of the old weights
// (EngineUpdateTest.UpdateRecomputeKv*).
void Engine::SwitchWeights() {
  const Clock::time_point start = Clock::now();
  WeightUpdateResult result;
  if (version_ != nullptr) result.previous = *version_;
  if (update_->update.mode == InFlightMode::kAbort) {
    result.num_aborted = AbortRequests("the weights were updated");
  } else {
    for (const auto& [ticket, request] : requests_) {
      result.num_recomputed +=
          std::any_of(request->samples.begin(), request->samples.end(),
                      [](const auto& sequence) { return sequence->num_cached > 0; });
    }
    scheduler_.PreemptAll();
  }
  StagedWeights& staged = **update_->staged;
  if (const absl::Status switched = runner_->Serve(staged); !switched.ok()) {
    FinishUpdate(switched);
    return Fail(switched);
  }
  result.current = {.id = update_->update.weight_version.value_or(result.previous.id + 1),
                    .digest = std::move(staged.digest)};
  version_ = std::make_shared<const WeightVersion>(result.current);
  static_cast<void>(Failpoint("weights.switched"));
  result.stage_time = update_->stage_time;
  result.switch_time = Since(start);
  ISOBIT_LOG(Info) << "serving weights " << result.current.id << ", digest "
                   << result.current.digest;
  FinishUpdate(std::move(result));
}

void Engine::FinishUpdate(absl::StatusOr<WeightUpdateResult> result) {
  if (update_->staged->ok()) retired_ = std::move((*update_->staged)->ranks);
  outbox_.push_back(
      [reply = std::move(update_->reply), result = std::move(result)] { reply(result); });
  update_.reset();
}

void Engine::HoldNewcomersWhileWaiting() {
  const bool update_waits = update_ && update_->staged;
  if (paused_ || !pauses_.empty() || update_waits) {
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
