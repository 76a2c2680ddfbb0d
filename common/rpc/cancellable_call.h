// A unary call that another thread finishes, and that knows whether its caller still waits.
#ifndef ISOBIT_COMMON_RPC_CANCELLABLE_CALL_H_
#define ISOBIT_COMMON_RPC_CANCELLABLE_CALL_H_

#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

namespace isobit {

// Lives until both gRPC and whoever finishes it are done with it.
class CancellableCall final : public grpc::ServerUnaryReactor {
 public:
  // on_abandoned: called at most once, when the client has gone or the deadline has passed; it must
  // not block. Call in the handler, and return get() from there; Finish it exactly once.
  static std::shared_ptr<CancellableCall> Start(std::function<void()> on_abandoned) {
    const std::shared_ptr<CancellableCall> call(new CancellableCall(std::move(on_abandoned)));
    call->self_ = call;
    return call;
  }

  // Once true, it stays true. Thread-safe.
  bool is_abandoned() const { return is_abandoned_; }

 private:
  explicit CancellableCall(std::function<void()> on_abandoned)
      : on_abandoned_(std::move(on_abandoned)) {}

  void OnCancel() override {
    is_abandoned_ = true;
    on_abandoned_();
  }
  void OnDone() override { const std::shared_ptr<CancellableCall> self = std::move(self_); }

  const std::function<void()> on_abandoned_;
  std::shared_ptr<CancellableCall> self_;
  std::atomic<bool> is_abandoned_{false};
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CANCELLABLE_CALL_H_
