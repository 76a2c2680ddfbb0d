// The reactor of a unary call that is answered later.
#include "common/rpc/unary_call.h"

#include "common/rpc/status_convert.h"

namespace isobit {

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status, *context));
  return reactor;
}

std::shared_ptr<UnaryCall> UnaryCall::Start(grpc::CallbackServerContext* context, CallGate& gate,
                                            std::function<void()> on_abandoned) {
  const std::shared_ptr<UnaryCall> call(new UnaryCall(context, gate, std::move(on_abandoned)));
  call->self_ = call;
  return call;
}

void UnaryCall::Answer(const absl::Status& status) { Finish(ToGrpcStatus(status, context_)); }

void UnaryCall::OnCancel() {
  is_abandoned_ = true;
  if (on_abandoned_) on_abandoned_();
}

}  // namespace isobit
