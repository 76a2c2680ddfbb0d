// The states of the gate, and when a pause takes effect.
#include "rollout/engine/control_gate.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace isobit {

absl::Status ControlGate::Available() const {
  if (!failure_.ok()) {
    return absl::UnavailableError(absl::StrCat("the engine has failed: ", failure_.message()));
  }
  return draining_ ? absl::UnavailableError("the server is draining") : absl::OkStatus();
}

std::vector<PausedJob> ControlGate::Continue() {
  paused_ = false;
  return std::exchange(pauses_, {});
}

std::vector<std::function<void()>> ControlGate::Settle(size_t num_in_flight, RequestTable& table,
                                                       std::vector<Emission>& outbox) {
  held_ = false;
  std::vector<std::function<void()>> jobs;
  std::vector<PausedJob> waiting;
  for (PausedJob& pause : std::exchange(pauses_, {})) {
    auto result = TryPause(pause, num_in_flight, table);
    if (!result) {
      waiting.push_back(std::move(pause));
      continue;
    }
    if (result->ok() && pause.run) {
      jobs.push_back([run = std::move(pause.run), paused = **result] { run(paused); });
    } else {
      outbox.push_back(
          [reply = std::move(pause.reply), result = *std::move(result)] { reply(result); });
    }
  }
  pauses_ = std::move(waiting);
  if (draining_ && paused_) table.AbortAll("the server stops while generation is paused");
  return jobs;
}

std::optional<absl::StatusOr<PauseResult>> ControlGate::TryPause(const PausedJob& pause,
                                                                 size_t num_in_flight,
                                                                 RequestTable& table) {
  if (!failure_.ok()) return Available();
  // Asked right before the pause takes effect: it is too late to abandon it afterwards.
  if (const absl::Status awaited = CheckAwaited(pause.is_abandoned, "pause"); !awaited.ok()) {
    return awaited;
  }
  const bool waits = pause.mode == PauseMode::kWait;
  if (waits) table.scheduler().HoldNewcomers();
  const bool has_work = waits && table.scheduler().HasWork();
  if ((has_work && !paused_) || !IsQuiet(num_in_flight)) return std::nullopt;
  if (has_work) {
    return absl::FailedPreconditionError(absl::StrCat("generation is paused with ", table.size(),
                                                      " requests kept: they cannot finish"));
  }
  PauseResult result;
  if (pause.mode == PauseMode::kAbort) {
    result.num_aborted = table.AbortAll("generation was paused");
  }
  result.num_kept = table.size();
  paused_ = true;
  return result;
}

bool ControlGate::IsQuiet(size_t num_in_flight) {
  if (num_in_flight > 0) held_ = true;
  return num_in_flight == 0;
}

void ControlGate::HoldNewcomers(bool update_waits, Scheduler& scheduler) const {
  if (paused_ || !pauses_.empty() || update_waits) {
    scheduler.HoldNewcomers();
  } else {
    scheduler.ReleaseNewcomers();
  }
}

}  // namespace isobit
