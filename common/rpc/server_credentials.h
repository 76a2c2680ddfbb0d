// A server's credentials: TLS whose files are taken up again when they change, or plain text;
// either with a check of each call before anything of it is read.
#ifndef ISOBIT_COMMON_RPC_SERVER_CREDENTIALS_H_
#define ISOBIT_COMMON_RPC_SERVER_CREDENTIALS_H_

#include <grpcpp/security/server_credentials.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/rpc/tls_files.h"

namespace isobit {

// What a server knows of a call before it reads its message. Valid during the check alone.
struct CallFacts {
  absl::string_view method;                        // such as "/isobit.v1.ScorerService/Score"
  std::optional<absl::string_view> authorization;  // the header, if the client sends one
  // Names in the client's certificate, which the handshake has verified: its subject alternative
  // names, or the common name where it has none; empty without one.
  std::vector<std::string> certificate_names;
};

// OK lets the call through; else the client gets the status. Any thread; must not block.
using CallCheck = std::function<absl::Status(const CallFacts&)>;

// In both, handlers do not get to see the header `hidden_header`, unless it is empty.

// TLS 1.2 or 1.3 with `files`, which name a certificate; with a CA, clients need a certificate that
// it signed. Files that change are taken up at the next connection; what cannot be used is logged
// and leaves the old ones in force. Errors: as ReadTlsPems.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TlsCredentials(
    const TlsFiles& files, CallCheck check, std::string hidden_header = "");

// Plain text between processes of this host: gRPC closes connections over other than loopback
// addresses.
std::shared_ptr<grpc::ServerCredentials> LoopbackCredentials(CallCheck check,
                                                             std::string hidden_header = "");

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_SERVER_CREDENTIALS_H_
