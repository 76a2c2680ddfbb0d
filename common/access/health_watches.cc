// Counts health watches in an interceptor, as gRPC's own service answers them.
#include "common/access/health_watches.h"

#include <utility>

#include "absl/strings/string_view.h"
#include "common/access/end_call.h"
#include "common/access/held_bytes.h"

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
  explicit Factory(std::shared_ptr<Quota> quota) : quota_(std::move(quota)) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return info->method() == kWatch ? new CountedWatch(quota_, *info->server_context()) : nullptr;
  }

 private:
  const std::shared_ptr<Quota> quota_;
};

}  // namespace

std::shared_ptr<Quota> HealthWatchQuota() {
  return Quota::Create({.streams = kMaxClientHealthWatches}, {.streams = kMaxHealthWatches});
}

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> LimitHealthWatches(
    std::shared_ptr<Quota> quota) {
  return std::make_unique<Factory>(std::move(quota));
}

}  // namespace isobit
