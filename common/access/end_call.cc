// Ends calls through gRPC's C interface: its C++ classes can cancel a call, but not say why.
#include "common/access/end_call.h"

#include <grpc/grpc.h>

#include <string>

#include "proto/isobit/status_convert.h"

namespace isobit {

OpenCall OpenCallOf(grpc::ServerContextBase& context) {
  grpc_call* const call = context.c_call();
  grpc_call_ref(call);
  return OpenCall(call, grpc_call_unref);
}

// The documentation of grpc_call_cancel_with_status says that the peer does not see the status. A
// server of gRPC 1.51 sends it, as trailers. INVARIANT: the client sees it
// (AccessChangesTest.AStreamEndsWithTheRefusalOfANewCall, HealthWatchesTest.*,
// ServerProcessTest.*).
void EndCall(const OpenCall& call, const absl::Status& status) {
  const grpc::Status wire = ToGrpcStatus(status);
  grpc_call_cancel_with_status(call.get(), static_cast<grpc_status_code>(wire.error_code()),
                               wire.error_message().c_str(), nullptr);
}

}  // namespace isobit
