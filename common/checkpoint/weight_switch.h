// The rules of a weight update, and the order of what it does. A service prepares new weights
// beside those that serve, quiesces, and swaps. Not here: how weights are prepared
// (kernels/model/prepare_weights.h), and how a service quiesces.
#ifndef ISOBIT_COMMON_CHECKPOINT_WEIGHT_SWITCH_H_
#define ISOBIT_COMMON_CHECKPOINT_WEIGHT_SWITCH_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/awaited.h"
#include "common/checkpoint/opened_model.h"
#include "common/checkpoint/streamed_source.h"

namespace isobit {

// What happens to requests in flight.
enum class InFlightMode {
  kAbort,
  kWait,         // they finish under the old weights; new ones wait
  kRecomputeKv,  // they go on under the new weights; rollout only
};

struct WeightUpdate {
  std::string model_path{};                  // relative to the service's model root
  std::optional<uint64_t> weight_version{};  // unset: the current one plus 1
  std::string expected_digest{};             // empty: any
  InFlightMode mode = InFlightMode::kAbort;
  IsAbandoned is_abandoned = nullptr;
  std::shared_ptr<const StreamedSource> stream = nullptr;  // instead of model_path and digest
  // Called by WeightSwitch::Begin once it has accepted the update. May be null.
  std::function<void()> on_begun = nullptr;
};

struct WeightUpdateResult {
  WeightVersion previous;  // id 0 at the first load
  WeightVersion current;
  size_t num_aborted = 0;                     // requests
  size_t num_recomputed = 0;                  // requests
  std::chrono::microseconds prepare_time{0};  // to read, check and pack
  std::chrono::microseconds switch_time{0};   // from quiescence until the new weights serve
};

// New weights that do not serve yet.
struct PreparedUpdate {
  std::string digest;  // of exactly these weights, 64 hex digits
  // Makes the new weights serve. Called at most once, when nothing uses the old ones. The result's
  // versions are set before the call; the function may add its counts of requests. Owns the new
  // weights, and after the call may own the old ones.
  std::function<absl::Status(WeightUpdateResult&)> swap;
};

struct FinishedUpdate {
  absl::StatusOr<WeightUpdateResult> result;
  absl::StatusOr<PreparedUpdate> retired;  // free it without the owner's lock: that takes time
};

// The updates of a service, one at a time. The owner's lock guards the object, in every call.
class WeightSwitch {
 public:
  // Ends or holds back requests, as the update says. Returns true once nothing uses the old weights
  // or ever will. Settle calls it until it returns true. An error ends the update.
  using Quiesce = absl::FunctionRef<absl::StatusOr<bool>(const WeightUpdate&, WeightUpdateResult&)>;

  bool is_preparing() const { return update_.has_value() && !update_->prepared.has_value(); }
  // Whether the new weights are prepared but Settle has not finished the update yet.
  bool is_waiting() const { return update_.has_value() && update_->prepared.has_value(); }

  // Begins an update and returns the id of the new weights. The owner then prepares them, without
  // holding its lock. ABORTED: another update is in progress. INVALID_ARGUMENT: the id is not
  // greater than the current one, or a given id exceeds 2^63 - 1.
  absl::StatusOr<uint64_t> Begin(const WeightUpdate& update, const WeightVersion& present);

  // prepared: the new weights, or the error that prevented them.
  void SetPrepared(absl::StatusOr<PreparedUpdate> prepared);

  // Advances a waiting update. Returns it once it has finished; returns nothing if there is none,
  // or if the service is not yet quiet. After any error but one of the swap, the old weights still
  // serve. Errors: that of the preparation; `available`, if the owner cannot serve at all;
  // CANCELLED: the update has been abandoned; those of `quiesce`.
  // INVARIANT: nothing is swapped before the service is quiet, or after the caller has gone
  // (WeightSwitchTest.*).
  std::optional<FinishedUpdate> Settle(const absl::Status& available, Quiesce quiesce);

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    WeightUpdate update;
    WeightUpdateResult result{};
    Clock::time_point begin = Clock::now();
    std::optional<absl::StatusOr<PreparedUpdate>> prepared{};
  };

  // Quiesces and swaps. False: the service is not yet quiet.
  absl::StatusOr<bool> Advance(const absl::Status& available, Quiesce quiesce);
  absl::Status Swap();

  std::optional<Pending> update_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_WEIGHT_SWITCH_H_
