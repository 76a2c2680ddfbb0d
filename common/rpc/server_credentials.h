// A server's credentials: TLS with files that are read again when they change, or plain text. Both
// check each call before its message is read.
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

// What a server knows about a call before it reads the message. Valid only during the check.
struct CallFacts {
  absl::string_view method;                        // such as "/isobit.v1.ScorerService/Score"
  std::optional<absl::string_view> authorization;  // the header, if the client sends one
  // The names in the client's certificate, which the handshake has verified: its subject
  // alternative names, or the common name if it has none. Empty without a certificate.
  std::vector<std::string> certificate_names;
};

// OK allows the call; otherwise the client gets the status. Runs on any thread; must not block.
using CallCheck = std::function<absl::Status(const CallFacts&)>;

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
