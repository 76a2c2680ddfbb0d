// A server's credentials: TLS with files that are read again when they change, or plain text. Both
// check each call before its message is read.
#ifndef ISOBIT_COMMON_RPC_SERVER_CREDENTIALS_H_
#define ISOBIT_COMMON_RPC_SERVER_CREDENTIALS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "absl/status/statusor.h"
#include "common/access/call_gate.h"
#include "common/rpc/tls_files.h"

namespace isobit {

// TLS 1.2 or 1.3 with `files`, which name a certificate. If they name a CA, clients need a
// certificate signed by it. Changed files are used from the next connection on; if they are
// invalid, the error is logged and the old ones stay in force. Errors: those of ReadTlsPems.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TlsCredentials(const TlsFiles& files,
                                                                        CallCheck check);

// Plain text between processes of this host: gRPC closes connections that do not use loopback
// addresses.
std::shared_ptr<grpc::ServerCredentials> LoopbackCredentials(CallCheck check);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_SERVER_CREDENTIALS_H_
