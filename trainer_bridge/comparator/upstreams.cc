// Calls the rollout and the scorer.
#include "trainer_bridge/comparator/upstreams.h"

#include <atomic>
#include <mutex>
#include <vector>

#include "common/rpc/channel.h"

namespace isobit {
namespace {

// Two calls in flight and their answers. The call that ends last reports both.
struct InfoFetch {
  grpc::ClientContext rollout_context;
  grpc::ClientContext scorer_context;
  v1::GetServerInfoRequest request;
  v1::RolloutServerInfo rollout;
  v1::ScorerServerInfo scorer;
  UpstreamInfos infos;
  std::atomic<int> pending{2};
  std::function<void(const UpstreamInfos&)> done;

  void FinishOne() {
    if (--pending == 0) done(infos);
  }
};

template <typename Info>
absl::StatusOr<Info> Result(const grpc::Status& status, const char* side, Info& info) {
  if (status.ok()) return std::move(info);
  return Annotate(FromGrpcStatus(status), side);
}

// A channel that lives as long as the process. A call's context holds its channel and is destroyed
// on a gRPC thread. If that frees the last user of gRPC's callback queue, gRPC 1.51 ends the
// queue's threads from one of them, frees the queue that this thread still reads, and aborts the
// process.
std::shared_ptr<grpc::Channel> LastingChannel(const std::string& address,
                                              const ChannelSecurity& security) {
  static std::mutex mutex;
  static auto* const channels = new std::vector<std::shared_ptr<grpc::Channel>>;
  const std::lock_guard lock(mutex);
  return channels->emplace_back(MakeChannel(address, kMaxMessageBytes, security));
}

}  // namespace

Upstreams::Upstreams(const std::string& rollout_address, const std::string& scorer_address,
                     const ChannelSecurity& security)
    : rollout(v1::RolloutService::NewStub(LastingChannel(rollout_address, security))),
      scorer(v1::ScorerService::NewStub(LastingChannel(scorer_address, security))) {}

void FetchInfos(const Upstreams& upstreams, SteadyTime deadline,
                std::function<void(const UpstreamInfos&)> done) {
  auto fetch = std::make_shared<InfoFetch>();
  fetch->done = std::move(done);
  fetch->rollout_context.set_deadline(deadline);
  fetch->scorer_context.set_deadline(deadline);
  upstreams.rollout->async()->GetServerInfo(&fetch->rollout_context, &fetch->request,
                                            &fetch->rollout, [fetch](const grpc::Status& status) {
                                              fetch->infos.rollout = Result(
                                                  status, "rollout GetServerInfo", fetch->rollout);
                                              fetch->FinishOne();
                                            });
  upstreams.scorer->async()->GetServerInfo(
      &fetch->scorer_context, &fetch->request, &fetch->scorer, [fetch](const grpc::Status& status) {
        fetch->infos.scorer = Result(status, "scorer GetServerInfo", fetch->scorer);
        fetch->FinishOne();
      });
}

}  // namespace isobit
