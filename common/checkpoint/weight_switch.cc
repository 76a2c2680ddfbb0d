// The states of an update, and its checks of versions.
#include "common/checkpoint/weight_switch.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

// Of clients. Half of all ids are left for updates that name none, and every client's integers can
// hold it.
constexpr uint64_t kMaxGivenVersion = std::numeric_limits<int64_t>::max();

std::chrono::microseconds Since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() -
                                                               start);
}

}  // namespace

absl::StatusOr<uint64_t> WeightSwitch::Begin(const WeightUpdate& update,
                                             const WeightVersion& present) {
  if (update_) return absl::AbortedError("another weight update is in progress");
  if (update.weight_version.value_or(0) > kMaxGivenVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("weight_version: expected at most ", kMaxGivenVersion, ", got ",
                     *update.weight_version, ": later updates need greater ones"));
  }
  const uint64_t next = update.weight_version.value_or(present.id + 1);
  if (next <= present.id) {
    return absl::InvalidArgumentError(absl::StrCat("weight_version: expected more than ",
                                                   present.id, ", the present one, got ", next));
  }
  update_.emplace(Pending{.update = update});
  update_->result.previous = present;
  update_->result.current.id = next;
  if (update.on_begun) update.on_begun();
  return next;
}

void WeightSwitch::SetPrepared(absl::StatusOr<PreparedUpdate> prepared) {
  update_->result.prepare_time = Since(update_->begin);
  if (prepared.ok()) update_->result.current.digest = prepared->digest;
  update_->prepared.emplace(std::move(prepared));
}

std::optional<FinishedUpdate> WeightSwitch::Settle(const absl::Status& available, Quiesce quiesce) {
  if (!is_waiting()) return std::nullopt;
  const absl::StatusOr<bool> switched = Advance(available, quiesce);
  if (switched.ok() && !*switched) return std::nullopt;
  Pending ended = *std::exchange(update_, std::nullopt);
  absl::StatusOr<WeightUpdateResult> result = ended.result;
  if (!switched.ok()) result = switched.status();
  return FinishedUpdate{std::move(result), *std::move(ended.prepared)};
}

absl::StatusOr<bool> WeightSwitch::Advance(const absl::Status& available, Quiesce quiesce) {
  ISOBIT_RETURN_IF_ERROR(update_->prepared->status());
  ISOBIT_RETURN_IF_ERROR(available);
  // Checked last, under the owner's lock: an update that is abandoned later has already taken
  // effect.
  ISOBIT_RETURN_IF_ERROR(CheckAwaited(update_->update.is_abandoned, "weight update"));
  ISOBIT_ASSIGN_OR_RETURN(const bool is_quiet, quiesce(update_->update, update_->result));
  if (!is_quiet) return false;
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.switch"));
  ISOBIT_RETURN_IF_ERROR(Swap());
  return true;
}

absl::Status WeightSwitch::Swap() {
  const Clock::time_point start = Clock::now();
  WeightUpdateResult& result = update_->result;
  ISOBIT_RETURN_IF_ERROR((*update_->prepared)->swap(result));
  static_cast<void>(Failpoint("weights.switched"));
  result.switch_time = Since(start);
  ISOBIT_LOG(Info) << "serving weights " << result.current.id << ", digest "
                   << result.current.digest;
  return absl::OkStatus();
}

}  // namespace isobit
