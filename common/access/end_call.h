// Ends a call of a server from outside its handler, with a status of the server's choice.
#ifndef ISOBIT_COMMON_ACCESS_END_CALL_H_
#define ISOBIT_COMMON_ACCESS_END_CALL_H_

#include <grpcpp/server_context.h>

#include <memory>

#include "absl/status/status.h"

namespace isobit {

// Keeps a call valid, also after its end, until the last of these is destroyed.
using OpenCall = std::shared_ptr<grpc_call>;

// The call of `context`; its headers must have come.
OpenCall OpenCallOf(grpc::ServerContextBase& context);

// Makes the client see `status`, which is not OK, unless the call has ended. Its handler sees a
// cancelled call. May run callbacks of handlers: hold no lock that they take. Thread-safe.
void EndCall(const OpenCall& call, const absl::Status& status);

}  // namespace isobit

#endif  // ISOBIT_COMMON_ACCESS_END_CALL_H_
