// Asks the two services regularly whether they answer, what they serve, and whether their weights
// have changed.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_SIDE_WATCH_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_SIDE_WATCH_H_

#include <grpcpp/alarm.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "trainer_bridge/comparator/history.h"
#include "trainer_bridge/comparator/upstreams.h"

namespace isobit {

// Thread-safe.
class SideWatch final : public std::enable_shared_from_this<SideWatch> {
 public:
  static constexpr std::chrono::milliseconds kInterval{1000};
  // A service that does not answer within this time counts as not answering.
  static constexpr std::chrono::milliseconds kTimeout{2000};

  // Asks at once, and again kInterval after each answer, until Stop. Adds a mark to `history` when
  // a side's weights change.
  static std::shared_ptr<SideWatch> Start(std::shared_ptr<const Upstreams> upstreams,
                                          std::shared_ptr<History> history);

  void Stop();

  // The latest answers; before the first: UNAVAILABLE on both sides.
  UpstreamInfos Latest() const;
  // The id of the weights that serve, from Latest; 0: the side has not answered or has no weights.
  uint64_t RolloutVersion() const;
  uint64_t ScorerVersion() const;
  bool RolloutAnswers() const;
  bool ScorerAnswers() const;

 private:
  SideWatch(std::shared_ptr<const Upstreams> upstreams, std::shared_ptr<History> history);
  void Ask();
  void Take(const UpstreamInfos& infos);
  // Holds mutex_.
  void MarkChange(const std::string& side, const v1::ServerInfo& info,
                  std::optional<v1::WeightVersion>& known);

  const std::shared_ptr<const Upstreams> upstreams_;
  const std::shared_ptr<History> history_;

  mutable std::mutex mutex_;  // guards all below
  bool over_ = false;
  std::unique_ptr<grpc::Alarm> alarm_;
  UpstreamInfos latest_;
  std::optional<v1::WeightVersion> rollout_, scorer_;  // the latest known
};

// Why the two services cannot be compared now; empty if they can.
std::string Obstacle(const UpstreamInfos& infos);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_SIDE_WATCH_H_
