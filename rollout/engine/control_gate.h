// Decides whether requests are accepted and steps launched: pauses, drains and failure. Some
// changes have to wait until no step is in flight.
#ifndef ISOBIT_ROLLOUT_ENGINE_CONTROL_GATE_H_
#define ISOBIT_ROLLOUT_ENGINE_CONTROL_GATE_H_

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/awaited.h"
#include "rollout/engine/emitter.h"
#include "rollout/engine/request_table.h"

namespace isobit {

enum class PauseMode { kAbort, kWait, kKeep };
struct PauseResult {
  size_t num_aborted = 0;  // requests
  size_t num_kept = 0;     // requests that go on after the pause
};

// Receives a result or an error, on the thread that calls sinks. If the call is refused at once, it
// runs on the caller's thread. It must not block.
template <typename T>
using Reply = std::function<void(absl::StatusOr<T>)>;

// What a pause gets if generation was continued before the pause took effect.
inline absl::Status ContinuedBefore() {
  return absl::AbortedError("generation was continued before it had paused");
}

// What a call wants of a pause: pause, run, and maybe continue, which `run` does itself.
struct PausedJob {
  PauseMode mode;
  Reply<PauseResult> reply;  // gets the error if generation does not pause; without `run`, all
  IsAbandoned is_abandoned;
  // Called once generation has paused, on the engine thread and with its mutex. Null: the pause is
  // all that is wanted.
  std::function<void(const PauseResult&)> run{};
};

// Not thread-safe: the engine's mutex guards every call. Only the engine thread calls Settle and
// IsQuiet, because only it knows what is in flight.
class ControlGate {
 public:
  // UNAVAILABLE: the service is draining or has failed.
  absl::Status Available() const;
  // Whether steps may be launched now.
  bool MayLaunch() const { return !paused_ && !held_; }
  bool is_paused() const { return paused_; }
  // Whether a pause has been asked for and has not taken effect yet.
  bool has_waiting_pauses() const { return !pauses_.empty(); }

  void Pause(PausedJob job) { pauses_.push_back(std::move(job)); }
  // Undoes every pause. Returns those that had not taken effect; the caller must reply to them.
  std::vector<PausedJob> Continue();
  void Drain() { draining_ = true; }
  void Fail(const absl::Status& failure) { failure_ = failure; }

  // Call between two launches. Applies the pauses that can take effect now, puts their replies into
  // the outbox, and returns their jobs, to be run in this order. If draining and paused, ends every
  // request.
  std::vector<std::function<void()>> Settle(size_t num_in_flight, RequestTable& table,
                                            std::vector<Emission>& outbox);

  // Whether no step is in flight. If one is, no further step is launched before the next Settle.
  bool IsQuiet(size_t num_in_flight);

  // Makes new requests wait while generation is paused, or while a pause or an update waits.
  void HoldNewcomers(bool update_waits, Scheduler& scheduler) const;

 private:
  // The pause's result, or nothing if it has to wait.
  std::optional<absl::StatusOr<PauseResult>> TryPause(const PausedJob& pause, size_t num_in_flight,
                                                      RequestTable& table);

  std::vector<PausedJob> pauses_;
  bool paused_ = false;
  bool held_ = false;  // until nothing is in flight
  bool draining_ = false;
  absl::Status failure_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_ENGINE_CONTROL_GATE_H_
