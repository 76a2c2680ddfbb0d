// Ends a call of a server from outside its handler, with a status of the server's own.
#ifndef ISOBIT_COMMON_RPC_END_CALL_H_
#define ISOBIT_COMMON_RPC_END_CALL_H_

#include <grpcpp/server_context.h>

#include <memory>

#include "absl/status/status.h"

namespace isobit {

// A call that stays valid for as long as one of these is there, also after its end.
using OpenCall = std::shared_ptr<grpc_call>;

// The call of `context`, whose headers have come.
OpenCall OpenCallOf(grpc::ServerContextBase& context);

// Has the client see `status`, which is not OK, unless the call has ended. Its handler sees a call
// that is cancelled. It may run callbacks of handlers: hold no lock that those take. Thread-safe.
void EndCall(const OpenCall& call, const absl::Status& status);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_END_CALL_H_
