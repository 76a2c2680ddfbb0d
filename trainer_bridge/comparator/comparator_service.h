// The comparator's gRPC service: starts one session for each call. Each kind of session has a file
// of its own; gap.h and statistics.h define the gaps.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARATOR_SERVICE_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARATOR_SERVICE_H_

#include <future>
#include <memory>
#include <mutex>
#include <vector>

#include "common/access/call_gate.h"
#include "common/access/held_bytes.h"
#include "common/metrics/metrics.h"
#include "isobit/v1/comparator.grpc.pb.h"
#include "trainer_bridge/comparator/history.h"
#include "trainer_bridge/comparator/recording.h"
#include "trainer_bridge/comparator/shadow.h"
#include "trainer_bridge/comparator/side_watch.h"
#include "trainer_bridge/comparator/upstreams.h"
#include "trainer_bridge/comparator/watch_session.h"

namespace isobit {

class ComparatorService final : public v1::ComparatorService::CallbackService {
 public:
  // memory: bounds what Compare and Record calls may hold.
  explicit ComparatorService(std::shared_ptr<Upstreams> upstreams,
                             const ByteLimits& memory = {.total = 1 << 30, .client_share = 0.5},
                             std::shared_ptr<CallGate> gate = CallGate::Create(),
                             std::shared_ptr<Metrics> metrics = std::make_shared<Metrics>());

  ~ComparatorService() override;

  // Starts asking both services regularly, for the metrics and the page. Call it at most once,
  // before the service is used.
  void WatchSides();
  // Records what is compared from now on. Call it at most once, before StartShadow and before the
  // service is used. Errors: those of Recording::Open.
  absl::Status StartRecording(const RecordingOptions& options);
  // Compares a share, in (0, 1], of the rollout's own traffic until BeginDrain. Call it at most
  // once, before the service is used.
  void StartShadow(double fraction);
  const std::shared_ptr<SideWatch>& side_watch() const { return side_watch_; }  // null: not watched
  const std::shared_ptr<History>& history() const { return history_; }

  grpc::ServerWriteReactor<v1::CompareEvent>* Compare(grpc::CallbackServerContext* context,
                                                      const v1::CompareRequest* request) override;
  grpc::ServerReadReactor<v1::RecordRequest>* Record(grpc::CallbackServerContext* context,
                                                     v1::CompareSummary* summary) override;
  grpc::ServerWriteReactor<v1::WatchResponse>* Watch(grpc::CallbackServerContext* context,
                                                     const v1::WatchRequest* request) override;
  grpc::ServerUnaryReactor* Localise(grpc::CallbackServerContext* context,
                                     const v1::LocaliseRequest* request,
                                     v1::LocaliseResponse* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::ComparatorServerInfo* info) override;

  // Refuses new calls except GetServerInfo with UNAVAILABLE. Ends Watch streams with it, too, as
  // they never end by themselves. Comparisons in flight go on. Thread-safe.
  void BeginDrain();

 private:
  // UNAVAILABLE: the service is draining.
  absl::Status Available();
  // OK if a stream of comparisons may begin. Errors: those of Available and CallGate::Admit.
  absl::Status Admit(const grpc::CallbackServerContext& context);

  const std::shared_ptr<Upstreams> upstreams_;
  const std::shared_ptr<History> history_;
  const std::shared_ptr<ByteBudget> memory_;
  const std::shared_ptr<CallGate> gate_;
  const std::shared_ptr<Metrics> metrics_;
  Observations observations_;
  std::shared_ptr<SideWatch> side_watch_;
  const ShadowMetrics shadow_metrics_;
  const RecordingMetrics recording_metrics_;
  std::shared_ptr<Recording> recording_;  // null: off
  std::shared_ptr<Shadow> shadow_;        // null: off

  std::mutex mutex_;
  bool draining_ = false;                             // guarded by mutex_
  std::vector<std::weak_ptr<WatchSession>> watches_;  // guarded by mutex_
  bool localising_ = false;                           // guarded by mutex_
  std::future<void> localisation_;                    // the last one; guarded by mutex_
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARATOR_SERVICE_H_
