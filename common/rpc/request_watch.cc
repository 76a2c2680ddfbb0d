// The interceptor that answers with the parser's reason and counts memory.
#include "common/rpc/request_watch.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "proto/isobit/bounded_request.h"

namespace isobit {
namespace {

using grpc::experimental::InterceptionHookPoints;

// gRPC's memory for a call without its messages, as measured.
constexpr size_t kCallBytes = 20 << 10;
// The most bytes of memory for one byte on the wire: 500,000 short ids are 11 MB on the wire and
// take 60 MB.
constexpr size_t kBytesPerByte = 6;

// gRPC makes one for each call and destroys it with the call.
class RequestWatch final : public grpc::experimental::Interceptor {
 public:
  explicit RequestWatch(std::shared_ptr<std::atomic<size_t>> freed_bytes)
      : freed_bytes_(std::move(freed_bytes)) {}

  ~RequestWatch() override { *freed_bytes_ += kCallBytes + kBytesPerByte * request_bytes_; }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    // gRPC calls this on the thread that has just parsed the message, so the thread's last reading
    // belongs to this call. INVARIANT: each caller gets its own error
    // (RequestWatchTest.ErrorsKeepToTheirCalls).
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE)) {
      RequestReading reading = TakeLastReading();
      request_bytes_ = std::max(request_bytes_, reading.bytes);
      if (error_.empty()) error_ = std::move(reading.error);
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS) &&
        !error_.empty()) {
      methods->ModifySendStatus(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, error_));
    }
    methods->Proceed();
  }

 private:
  const std::shared_ptr<std::atomic<size_t>> freed_bytes_;
  size_t request_bytes_ = 0;
  std::string error_;
};

class Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(std::shared_ptr<std::atomic<size_t>> freed_bytes)
      : freed_bytes_(std::move(freed_bytes)) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo*) override {
    return new RequestWatch(freed_bytes_);
  }

 private:
  const std::shared_ptr<std::atomic<size_t>> freed_bytes_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> WatchRequests(
    std::shared_ptr<std::atomic<size_t>> freed_bytes) {
  return std::make_unique<Factory>(std::move(freed_bytes));
}

}  // namespace isobit
