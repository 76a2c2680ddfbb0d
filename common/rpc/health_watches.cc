// The interceptor that counts open watches and refuses those beyond the bound.
#include "common/rpc/health_watches.h"

#include <utility>

#include "absl/strings/string_view.h"
#include "common/rpc/end_call.h"
#include "common/rpc/held_bytes.h"
#include "common/rpc/quota.h"

namespace isobit {
namespace {

constexpr absl::string_view kWatch = "/grpc.health.v1.Health/Watch";

// One watch: gRPC makes it with the call and destroys it with it.
class CountedWatch final : public grpc::experimental::Interceptor {
 public:
  CountedWatch(std::shared_ptr<Quota> quota, grpc::ServerContextBase& context)
      : quota_(std::move(quota)), context_(context) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using Point = grpc::experimental::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(Point::POST_RECV_INITIAL_METADATA)) {
      absl::StatusOr<Quota::Lease> lease = quota_->Take(ClientOf(context_), {.streams = 1});
      if (lease.ok()) {
        lease_ = *std::move(lease);
      } else {
        // gRPC's handler, which comes next, sees a call that is cancelled.
        EndCall(OpenCallOf(context_), lease.status());
      }
    }
    methods->Proceed();
  }

 private:
  const std::shared_ptr<Quota> quota_;
  grpc::ServerContextBase& context_;
  Quota::Lease lease_;
};

class Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return info->method() == kWatch ? new CountedWatch(quota_, *info->server_context()) : nullptr;
  }

 private:
  const std::shared_ptr<Quota> quota_ =
      Quota::Create({.streams = kMaxClientHealthWatches}, {.streams = kMaxHealthWatches});
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> LimitHealthWatches() {
  return std::make_unique<Factory>();
}

}  // namespace isobit
