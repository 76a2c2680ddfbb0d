// Routes the comparator's calls to their sessions.
#include "trainer_bridge/comparator/comparator_service.h"

#include <algorithm>
#include <utility>

#include "common/base/status_macros.h"
#include "common/rpc/service_metrics.h"
#include "common/rpc/steady_time.h"
#include "common/rpc/unary_call.h"
#include "proto/isobit/status_convert.h"
#include "trainer_bridge/comparator/comparator_metrics.h"
#include "trainer_bridge/comparator/compare_session.h"
#include "trainer_bridge/comparator/localise.h"
#include "trainer_bridge/comparator/record_session.h"

namespace isobit {
namespace {

constexpr std::chrono::seconds kInfoTimeout(2);

// A stream that ends at once.
template <typename Response>
grpc::ServerWriteReactor<Response>* Refuse(grpc::CallbackServerContext* context,
                                           const absl::Status& status) {
  const auto writer = StreamWriter<Response>::Start(context);
  writer->Finish(status);
  return writer.get();
}

// A Record call that ends at once.
class RefusedRecord final : public grpc::ServerReadReactor<v1::RecordRequest> {
 public:
  explicit RefusedRecord(const grpc::Status& status) { Finish(status); }

 private:
  void OnDone() override { delete this; }
};

}  // namespace

ComparatorService::ComparatorService(std::shared_ptr<Upstreams> upstreams, const ByteLimits& memory,
                                     std::shared_ptr<CallGate> gate,
                                     std::shared_ptr<Metrics> metrics)
    : upstreams_(std::move(upstreams)),
      history_(std::make_shared<History>()),
      memory_(std::make_shared<ByteBudget>("Compare and Record calls", memory)),
      gate_(std::move(gate)),
      metrics_(std::move(metrics)),
      observations_(ObserveHistory(*metrics_, history_)),
      shadow_metrics_(*metrics_),
      recording_metrics_(*metrics_) {
  observations_.push_back(ObserveHeldBytes(*metrics_, "calls", memory_));
}

absl::Status ComparatorService::Available() {
  const std::lock_guard lock(mutex_);
  return draining_ ? absl::UnavailableError("the comparator is draining") : absl::OkStatus();
}

absl::Status ComparatorService::Admit(const grpc::CallbackServerContext& context) {
  ISOBIT_RETURN_IF_ERROR(Available());
  return gate_->Admit(context, {.requests = 1, .streams = 1});
}

grpc::ServerWriteReactor<v1::CompareEvent>* ComparatorService::Compare(
    grpc::CallbackServerContext* context, const v1::CompareRequest* request) {
  const absl::Status admitted = Admit(*context);
  if (!admitted.ok()) return Refuse<v1::CompareEvent>(context, admitted);
  v1::CompareRequest content = *request;
  DropContent(request);
  return CompareSession::Start(context, std::move(content), upstreams_, history_, recording_,
                               memory_->Open(gate_->ClientOf(*context)),
                               [gate = gate_, context](int64_t tokens) {
                                 return gate->Admit(*context, {.tokens = tokens});
                               });
}

grpc::ServerReadReactor<v1::RecordRequest>* ComparatorService::Record(
    grpc::CallbackServerContext* context, v1::CompareSummary* summary) {
  const absl::Status admitted = Admit(*context);
  if (!admitted.ok()) return new RefusedRecord(ToGrpcStatus(admitted, *context));
  return new RecordSession(*context, *gate_, history_, summary,
                           memory_->Open(gate_->ClientOf(*context)));
}

grpc::ServerWriteReactor<v1::WatchResponse>* ComparatorService::Watch(
    grpc::CallbackServerContext* context, const v1::WatchRequest* request) {
  if (const absl::Status valid = WatchSession::Validate(*request); !valid.ok()) {
    return Refuse<v1::WatchResponse>(context, valid);
  }
  const absl::Status admitted = gate_->Admit(*context, {.requests = 1, .streams = 1});
  if (!admitted.ok()) return Refuse<v1::WatchResponse>(context, admitted);
  std::lock_guard<std::mutex> lock(mutex_);
  if (draining_) {
    return Refuse<v1::WatchResponse>(context, absl::UnavailableError("the comparator is draining"));
  }
  const std::shared_ptr<WatchSession> session = WatchSession::Start(context, *request, history_);
  std::erase_if(watches_, [](const auto& watch) { return watch.expired(); });
  watches_.push_back(session);
  return session->reactor();
}

grpc::ServerUnaryReactor* ComparatorService::Localise(grpc::CallbackServerContext* context,
                                                      const v1::LocaliseRequest* request,
                                                      v1::LocaliseResponse* response) {
  absl::StatusOr<const v1::LocaliseRequest*> valid = request;
  if (const absl::Status status = ValidateLocaliseRequest(*request); !status.ok()) valid = status;
  if (const absl::Status available = Available(); !available.ok()) valid = available;
  return AnswerLater(
      context, *gate_, valid, nullptr,
      [&](const v1::LocaliseRequest* what, const std::shared_ptr<UnaryCall>& call) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (localising_) {
          return call->Answer(absl::ResourceExhaustedError("another call of Localise is running"));
        }
        localising_ = true;
        // It blocks, so it has a thread of its own. The call outlives all but the last line.
        localisation_ = std::async(std::launch::async, [this, context, what, response, call] {
          const absl::StatusOr<v1::LocaliseResponse> found =
              isobit::Localise(*upstreams_, *what, *context);
          if (found.ok()) *response = *found;
          {
            const std::lock_guard<std::mutex> done(mutex_);
            localising_ = false;
          }
          call->Answer(found.status());
        });
      });
}

grpc::ServerUnaryReactor* ComparatorService::GetServerInfo(grpc::CallbackServerContext* context,
                                                           const v1::GetServerInfoRequest*,
                                                           v1::ComparatorServerInfo* info) {
  info->set_version(ISOBIT_VERSION);
  info->set_uptime_seconds(history_->UptimeSeconds());
  *info->mutable_total() = history_->Total();
  const SteadyTime deadline =
      std::min<SteadyTime>(DeadlineOf(*context), std::chrono::steady_clock::now() + kInfoTimeout);
  return AnswerLater(context, *gate_, absl::StatusOr<SteadyTime>(deadline), nullptr,
                     [&](SteadyTime until, const std::shared_ptr<UnaryCall>& call) {
                       FetchInfos(*upstreams_, until, [info, call](const UpstreamInfos& infos) {
                         if (infos.rollout.ok()) *info->mutable_rollout() = *infos.rollout;
                         if (infos.scorer.ok()) *info->mutable_scorer() = *infos.scorer;
                         info->set_obstacle(Obstacle(infos));
                         call->Answer(absl::OkStatus());
                       });
                     });
}

void ComparatorService::WatchSides() {
  side_watch_ = SideWatch::Start(upstreams_, history_);
  for (auto& observation : ObserveSides(*metrics_, side_watch_)) {
    observations_.push_back(std::move(observation));
  }
}

absl::Status ComparatorService::StartRecording(const RecordingOptions& options) {
  ISOBIT_ASSIGN_OR_RETURN(recording_, Recording::Open(options, recording_metrics_));
  return absl::OkStatus();
}

void ComparatorService::StartShadow(double fraction) {
  shadow_ = Shadow::Start(upstreams_, history_, recording_, shadow_metrics_, fraction);
}

ComparatorService::~ComparatorService() {
  if (shadow_ != nullptr) shadow_->Stop();
  if (side_watch_ != nullptr) side_watch_->Stop();
  if (recording_ != nullptr) recording_->End();
}

void ComparatorService::BeginDrain() {
  if (shadow_ != nullptr) shadow_->Stop();
  std::vector<std::weak_ptr<WatchSession>> watches;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    draining_ = true;
    watches.swap(watches_);
  }
  for (const auto& watch : watches) {
    if (const auto session = watch.lock()) {
      session->End(absl::UnavailableError("the comparator is draining"));
    }
  }
}

}  // namespace isobit
