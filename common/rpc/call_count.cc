// The interceptor that counts calls and keeps the means to end them.
#include "common/rpc/call_count.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace isobit {

// gRPC makes one for each call and destroys it with the call.
class CountedCall final : public grpc::experimental::Interceptor {
 public:
  CountedCall(std::shared_ptr<CallCount> count, grpc::ServerContextBase& context)
      : count_(std::move(count)), context_(context) {
    const std::lock_guard lock(count_->mutex_);
    count_->calls_.emplace(this, nullptr);
  }
  ~CountedCall() override {
    OpenCall ended;  // freed without the lock
    const std::lock_guard lock(count_->mutex_);
    const auto own = count_->calls_.find(this);
    ended = std::move(own->second);
    count_->calls_.erase(own);
    if (count_->calls_.empty()) count_->none_.notify_all();
  }
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using Point = grpc::experimental::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(Point::POST_RECV_INITIAL_METADATA)) Begin();
    methods->Proceed();
  }

 private:
  void Begin() {
    const OpenCall call = OpenCallOf(context_);
    absl::Status end;
    {
      const std::lock_guard lock(count_->mutex_);
      count_->calls_[this] = call;
      end = count_->end_;
    }
    if (!end.ok()) EndCall(call, end);
  }

  const std::shared_ptr<CallCount> count_;
  grpc::ServerContextBase& context_;
};

namespace {

class Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  Factory(std::vector<std::string> services, std::shared_ptr<CallCount> count)
      : services_(std::move(services)), count_(std::move(count)) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    const bool ours = std::any_of(services_.begin(), services_.end(), [&](const auto& service) {
      return absl::StartsWith(info->method(), absl::StrCat("/", service, "/"));
    });
    return ours ? new CountedCall(count_, *info->server_context()) : nullptr;
  }

 private:
  const std::vector<std::string> services_;
  const std::shared_ptr<CallCount> count_;
};

}  // namespace

void CallCount::WaitForNone(SteadyTime deadline) {
  std::unique_lock lock(mutex_);
  none_.wait_until(lock, deadline, [this] { return calls_.empty(); });
}

size_t CallCount::EndAll(const absl::Status& status) {
  std::vector<OpenCall> begun;
  size_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    end_ = status;
    count = calls_.size();
    for (const auto& [key, call] : calls_) {
      if (call != nullptr) begun.push_back(call);
    }
  }
  for (const OpenCall& call : begun) EndCall(call, status);
  return count;
}

int64_t CallCount::calls() {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(calls_.size());
}

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CountCallsOf(
    std::vector<std::string> services, std::shared_ptr<CallCount> count) {
  return std::make_unique<Factory>(std::move(services), std::move(count));
}

}  // namespace isobit
