// How handlers answer unary calls: at once, or later. In the second case they can check whether the
// caller still waits.
#ifndef ISOBIT_COMMON_RPC_UNARY_CALL_H_
#define ISOBIT_COMMON_RPC_UNARY_CALL_H_

#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/access/call_gate.h"

namespace isobit {

// Ends the call with `status`. If it is OK, the client gets the response in its current state.
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const absl::Status& status);

// A call that another thread answers. Lives until both gRPC and that thread have released it.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  // Call it in the handler, and return get() there. `gate` outlives the call. on_abandoned: as in
  // AnswerLater.
  static std::shared_ptr<UnaryCall> Start(grpc::CallbackServerContext* context, CallGate& gate,
                                          std::function<void()> on_abandoned);

  // Ends the call as isobit::Answer does. Exactly once, on any thread.
  void Answer(const absl::Status& status);

  // Whether the caller no longer waits for the answer, or may no longer have it. Ask right before
  // the call takes effect. Once true, it stays true. Thread-safe.
  bool is_abandoned() const { return is_abandoned_ || !gate_.Recheck(context_).ok(); }

 private:
  UnaryCall(grpc::CallbackServerContext* context, CallGate& gate,
            std::function<void()> on_abandoned)
      : context_(*context), gate_(gate), on_abandoned_(std::move(on_abandoned)) {}

  void OnCancel() override;
  void OnDone() override { const std::shared_ptr<UnaryCall> self = std::move(self_); }

  grpc::CallbackServerContext& context_;
  CallGate& gate_;
  const std::function<void()> on_abandoned_;
  std::shared_ptr<UnaryCall> self_;
  std::atomic<bool> is_abandoned_{false};
};

// The handler of a call that may take long. Refuses an `input` that is an error, takes one request
// of the client's quota, and calls start(input, call), which begins the work that will answer the
// call. on_abandoned: called at most once, when the client has gone or the deadline has passed; it
// must not block, and may be null.
template <typename Input, typename Start>
grpc::ServerUnaryReactor* AnswerLater(grpc::CallbackServerContext* context, CallGate& gate,
                                      absl::StatusOr<Input> input,
                                      std::function<void()> on_abandoned, const Start& start) {
  if (!input.ok()) return Answer(context, input.status());
  const absl::Status admitted = gate.Admit(*context, {.requests = 1});
  if (!admitted.ok()) return Answer(context, admitted);
  const std::shared_ptr<UnaryCall> call = UnaryCall::Start(context, gate, std::move(on_abandoned));
  start(*std::move(input), call);
  return call.get();
}

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_UNARY_CALL_H_
