// See call_count.h.
#include "common/rpc/call_count.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace isobit {

// gRPC makes one for each call and destroys it with the call.
class CountedCall final : public grpc::experimental::Interceptor {
 public:
  explicit CountedCall(std::shared_ptr<CallCount> count) : count_(std::move(count)) {
    const std::lock_guard lock(count_->mutex_);
    ++count_->calls_;
  }
  ~CountedCall() override {
    const std::lock_guard lock(count_->mutex_);
    if (--count_->calls_ == 0) count_->none_.notify_all();
  }
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    methods->Proceed();
  }

 private:
  const std::shared_ptr<CallCount> count_;
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
    return ours ? new CountedCall(count_) : nullptr;
  }

 private:
  const std::vector<std::string> services_;
  const std::shared_ptr<CallCount> count_;
};

}  // namespace

void CallCount::WaitForNone(std::chrono::system_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  none_.wait_until(lock, deadline, [this] { return calls_ == 0; });
}

int64_t CallCount::calls() {
  const std::lock_guard lock(mutex_);
  return calls_;
}

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CountCallsOf(
    std::vector<std::string> services, std::shared_ptr<CallCount> count) {
  return std::make_unique<Factory>(std::move(services), std::move(count));
}

}  // namespace isobit
