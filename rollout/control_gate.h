// Whether requests are accepted and steps launched: pauses, drains, failure, and what waits until
// no step is in flight.
#ifndef ISOBIT_ROLLOUT_CONTROL_GATE_H_
#define ISOBIT_ROLLOUT_CONTROL_GATE_H_

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/awaited.h"
#include "rollout/emitter.h"
#include "rollout/request_table.h"

namespace isobit {

enum class PauseMode { kAbort, kWait, kKeep };
struct PauseResult {
  size_t num_aborted = 0;  // requests
  size_t num_kept = 0;     // requests that stay
};

// Receives a result or an error, on the thread that calls sinks or, if refused at once, on the
// caller's. It must not block.
template <typename T>
using Reply = std::function<void(absl::StatusOr<T>)>;

struct PendingPause {
  PauseMode mode;
  Reply<PauseResult> reply;
  IsAbandoned is_abandoned;
};

// Not thread-safe: the engine's mutex guards every call. Settle and IsQuiet are called on the
// engine thread alone, which alone knows what is in flight.
class ControlGate {
 public:
  // UNAVAILABLE: draining, or failed.
  absl::Status Available() const;
  // Whether steps may be launched now.
  bool MayLaunch() const { return !paused_ && !held_; }
  bool is_paused() const { return paused_; }
  // Whether a pause has been asked for and not taken effect.
  bool has_waiting_pauses() const { return !pauses_.empty(); }

  void Pause(PendingPause pause) { pauses_.push_back(std::move(pause)); }
  // Undoes every pause. Returns those that had not taken effect, for the caller to tell them.
  std::vector<PendingPause> Continue();
  void Drain() { draining_ = true; }
  void Fail(const absl::Status& failure) { failure_ = failure; }

  // Between two launches: the pauses that can take effect do, and reply by the outbox. Once
  // draining and paused, ends every request.
  void Settle(size_t num_in_flight, RequestTable& table, std::vector<Emission>& outbox);

  // Whether no step is in flight. If one is, none is launched before the next Settle.
  bool IsQuiet(size_t num_in_flight);

  // While paused, or while a pause or an update waits, what comes from now on waits too.
  void HoldNewcomers(bool update_waits, Scheduler& scheduler) const;

 private:
  // Its result; unset: it waits.
  std::optional<absl::StatusOr<PauseResult>> TryPause(const PendingPause& pause,
                                                      size_t num_in_flight, RequestTable& table);

  std::vector<PendingPause> pauses_;
  bool paused_ = false;
  bool held_ = false;  // until nothing is in flight
  bool draining_ = false;
  absl::Status failure_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_CONTROL_GATE_H_
