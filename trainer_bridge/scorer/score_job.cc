// Delivery and end of a score request. See score_job.h.
#include "trainer_bridge/scorer/score_job.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"

namespace isobit {

ScoreJob::ScoreJob(std::vector<ScoreInput> inputs, ScoreOptions options,
                   std::shared_ptr<ScoreReceiver> receiver, size_t first_place)
    : inputs_(std::move(inputs)),
      options_(std::move(options)),
      receiver_(std::move(receiver)),
      first_place_(first_place),
      pending_(inputs_.size()) {
  ISOBIT_CHECK(pending_ > 0) << "a job without sequences";
}

std::string ScoreJob::NameOf(size_t index) const {
  return absl::StrCat("sequences[", first_place_ + index, "]");
}

void ScoreJob::Deliver(SequenceScore score) {
  const std::lock_guard lock(mutex_);
  if (pending_ == 0) return;
  receiver_->OnScore(std::move(score));
  if (--pending_ == 0) receiver_->OnDone(absl::OkStatus());
}

bool ScoreJob::End(const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  if (pending_ == 0) return false;
  pending_ = 0;
  receiver_->OnDone(status);
  return true;
}

bool ScoreJob::ended() const { return num_pending() == 0; }

size_t ScoreJob::num_pending() const {
  const std::lock_guard lock(mutex_);
  return pending_;
}

}  // namespace isobit
