// The questions to both services, and the latest answers.
#include "trainer_bridge/comparator/side_watch.h"

#include <utility>

#include "common/rpc/steady_time.h"
#include "trainer_bridge/comparator/pairing.h"

namespace isobit {
namespace {

template <typename Info>
uint64_t VersionOf(const absl::StatusOr<Info>& info) {
  return info.ok() ? info->server().weight_version().id() : 0;
}

}  // namespace

std::shared_ptr<SideWatch> SideWatch::Start(std::shared_ptr<const Upstreams> upstreams,
                                            std::shared_ptr<History> history) {
  const std::shared_ptr<SideWatch> watch(new SideWatch(std::move(upstreams), std::move(history)));
  watch->Ask();
  return watch;
}

SideWatch::SideWatch(std::shared_ptr<const Upstreams> upstreams, std::shared_ptr<History> history)
    : upstreams_(std::move(upstreams)),
      history_(std::move(history)),
      latest_{absl::UnavailableError("rollout: no answer yet"),
              absl::UnavailableError("scorer: no answer yet")} {}

void SideWatch::Stop() {
  const std::lock_guard lock(mutex_);
  over_ = true;
  alarm_.reset();
}

void SideWatch::Ask() {
  FetchInfos(*upstreams_, std::chrono::steady_clock::now() + kTimeout,
             [self = shared_from_this()](const UpstreamInfos& infos) { self->Take(infos); });
}

void SideWatch::Take(const UpstreamInfos& infos) {
  const std::lock_guard lock(mutex_);
  if (over_) return;
  latest_ = infos;
  if (infos.rollout.ok()) MarkChange("rollout", infos.rollout->server(), rollout_);
  if (infos.scorer.ok()) MarkChange("scorer", infos.scorer->server(), scorer_);
  // A new alarm each time: setting the old one again would destroy the callback that runs this.
  alarm_ = std::make_unique<grpc::Alarm>();
  alarm_->Set(std::chrono::steady_clock::now() + kInterval,
              [self = shared_from_this()](bool fired) {
                if (fired) self->Ask();
              });
}

void SideWatch::MarkChange(const std::string& side, const v1::ServerInfo& info,
                           std::optional<v1::WeightVersion>& known) {
  const v1::WeightVersion& now = info.weight_version();
  if (now.id() == 0) return;  // none loaded yet
  if (known && known->id() == now.id() && known->digest() == now.digest()) return;
  if (known) history_->AddMark(side, now);
  known = now;
}

UpstreamInfos SideWatch::Latest() const {
  const std::lock_guard lock(mutex_);
  return latest_;
}

uint64_t SideWatch::RolloutVersion() const {
  const std::lock_guard lock(mutex_);
  return VersionOf(latest_.rollout);
}

uint64_t SideWatch::ScorerVersion() const {
  const std::lock_guard lock(mutex_);
  return VersionOf(latest_.scorer);
}

bool SideWatch::RolloutAnswers() const {
  const std::lock_guard lock(mutex_);
  return latest_.rollout.ok();
}

bool SideWatch::ScorerAnswers() const {
  const std::lock_guard lock(mutex_);
  return latest_.scorer.ok();
}

std::string Obstacle(const UpstreamInfos& infos) {
  if (!infos.rollout.ok()) return infos.rollout.status().ToString();
  if (!infos.scorer.ok()) return infos.scorer.status().ToString();
  const absl::Status comparable =
      CheckSides(IdentityOf(infos.rollout->server()), IdentityOf(infos.scorer->server()),
                 /*allow_weight_mismatch=*/false);
  return {comparable.message().data(), comparable.message().size()};
}

}  // namespace isobit
