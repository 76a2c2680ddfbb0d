// Routes the comparator's calls to their sessions.
#include "trainer_bridge/comparator/comparator_service.h"

#include <algorithm>
#include <utility>

#include "trainer_bridge/comparator/compare_session.h"
#include "trainer_bridge/comparator/pairing.h"
#include "trainer_bridge/comparator/record_session.h"

namespace isobit {
namespace {

constexpr std::chrono::seconds kInfoTimeout(2);

// Why the two services cannot be compared now; empty when they can.
std::string Obstacle(const UpstreamInfos& infos) {
  if (!infos.rollout.ok()) return infos.rollout.status().ToString();
  if (!infos.scorer.ok()) return infos.scorer.status().ToString();
  const absl::Status comparable =
      CheckSides(IdentityOf(infos.rollout->server()), IdentityOf(infos.scorer->server()),
                 /*allow_weight_mismatch=*/false);
  return {comparable.message().data(), comparable.message().size()};
}

// A stream that ends at once.
grpc::ServerWriteReactor<v1::WatchResponse>* Refuse(grpc::CallbackServerContext* context,
                                                    const absl::Status& status) {
  const auto writer = StreamWriter<v1::WatchResponse>::Start(context);
  writer->Finish(status);
  return writer.get();
}

}  // namespace

ComparatorService::ComparatorService(std::shared_ptr<Upstreams> upstreams, const ByteLimits& memory)
    : upstreams_(std::move(upstreams)),
      history_(std::make_shared<History>()),
      memory_(std::make_shared<ByteBudget>("Compare and Record calls", memory)) {}

grpc::ServerWriteReactor<v1::CompareEvent>* ComparatorService::Compare(
    grpc::CallbackServerContext* context, const v1::CompareRequest* request) {
  v1::CompareRequest content = *request;
  DropContent(request);
  return CompareSession::Start(context, std::move(content), upstreams_, history_,
                               memory_->Open(ClientOf(*context)));
}

grpc::ServerReadReactor<v1::RecordRequest>* ComparatorService::Record(
    grpc::CallbackServerContext* context, v1::CompareSummary* summary) {
  return new RecordSession(history_, summary, memory_->Open(ClientOf(*context)));
}

grpc::ServerWriteReactor<v1::WatchResponse>* ComparatorService::Watch(
    grpc::CallbackServerContext* context, const v1::WatchRequest* request) {
  if (const absl::Status valid = WatchSession::Validate(*request); !valid.ok()) {
    return Refuse(context, valid);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (draining_) return Refuse(context, absl::UnavailableError("the comparator is draining"));
  const std::shared_ptr<WatchSession> session = WatchSession::Start(context, *request, history_);
  std::erase_if(watches_, [](const auto& watch) { return watch.expired(); });
  watches_.push_back(session);
  return session->reactor();
}

grpc::ServerUnaryReactor* ComparatorService::GetServerInfo(grpc::CallbackServerContext* context,
                                                           const v1::GetServerInfoRequest*,
                                                           v1::ComparatorServerInfo* info) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  info->set_version(ISOBIT_VERSION);
  info->set_uptime_seconds(history_->UptimeSeconds());
  *info->mutable_total() = history_->Total();
  const auto deadline =
      std::min(context->deadline(), std::chrono::system_clock::now() + kInfoTimeout);
  FetchInfos(*upstreams_, deadline, [info, reactor](const UpstreamInfos& infos) {
    if (infos.rollout.ok()) *info->mutable_rollout() = *infos.rollout;
    if (infos.scorer.ok()) *info->mutable_scorer() = *infos.scorer;
    info->set_obstacle(Obstacle(infos));
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

void ComparatorService::BeginDrain() {
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
