// The two services that the comparator calls, and its calls to them.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_UPSTREAMS_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_UPSTREAMS_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/rpc/channel_security.h"
#include "common/rpc/steady_time.h"
#include "isobit/v1/comparator.pb.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "isobit/v1/scorer.grpc.pb.h"
#include "proto/isobit/status_convert.h"

namespace isobit {

struct Upstreams {
  // Channels to the two addresses ("host:port"); they connect on first use.
  Upstreams(const std::string& rollout_address, const std::string& scorer_address,
            const ChannelSecurity& security = {});

  const std::unique_ptr<v1::RolloutService::Stub> rollout;
  const std::unique_ptr<v1::ScorerService::Stub> scorer;
};

// The two services' answers to GetServerInfo, or their errors.
struct UpstreamInfos {
  absl::StatusOr<v1::RolloutServerInfo> rollout;
  absl::StatusOr<v1::ScorerServerInfo> scorer;
};

// Asks both services and calls `done` once, from a gRPC thread, when both have answered or failed.
void FetchInfos(const Upstreams& upstreams, SteadyTime deadline,
                std::function<void(const UpstreamInfos&)> done);

// One server-streaming call that keeps itself alive until its end.
template <typename Request, typename Response>
class UpstreamStream final : public grpc::ClientReadReactor<Response> {
 public:
  using Context = std::shared_ptr<grpc::ClientContext>;
  using MessageCallback = std::function<void(const Response&)>;
  using DoneCallback = std::function<void(const absl::Status&, const Context&)>;

  // Calls `start(context, request, reactor)`, a stub's streaming method, and returns the context,
  // by which the call can be cancelled. `on_message` gets each message in turn. At the end
  // `on_done` gets the status and the same context, once. Both are called by gRPC threads, never by
  // this function itself.
  template <typename Start>
  static Context Begin(SteadyTime deadline, Request request, const Start& start,
                       MessageCallback on_message, DoneCallback on_done) {
    auto* stream =
        new UpstreamStream(std::move(request), std::move(on_message), std::move(on_done));
    const Context context = stream->context_;
    context->set_deadline(deadline);
    start(context.get(), &stream->request_, stream);
    stream->StartRead(&stream->response_);
    stream->StartCall();
    return context;
  }

 private:
  UpstreamStream(Request request, MessageCallback on_message, DoneCallback on_done)
      : request_(std::move(request)),
        on_message_(std::move(on_message)),
        on_done_(std::move(on_done)) {}

  void OnReadDone(bool ok) override {
    if (!ok) return;
    on_message_(response_);
    this->StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    on_done_(FromGrpcStatus(status, *context_), context_);
    delete this;
  }

  const Context context_ = std::make_shared<grpc::ClientContext>();
  const Request request_;
  Response response_;
  const MessageCallback on_message_;
  const DoneCallback on_done_;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_UPSTREAMS_H_
