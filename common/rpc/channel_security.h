// How this process calls other services: over TLS or in plain text, and as whom.
#ifndef ISOBIT_COMMON_RPC_CHANNEL_SECURITY_H_
#define ISOBIT_COMMON_RPC_CHANNEL_SECURITY_H_

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/rpc/tls_files.h"

namespace isobit {

struct ChannelSecurityOptions {
  TlsFiles tls{};  // with a CA: TLS; certificate and key are this process's own, for mTLS
  std::string server_name{};  // name in servers' certificates; empty: the host in the address
  std::string token_file{};   // its bearer token goes with every call; empty: none
};

struct ChannelSecurity {
  std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr;  // null: plain text
  std::string server_name{};
};

// Files are read again when they change. New certificates serve new connections within a second;
// while certificate and key do not match, new connections fail. A new bearer token goes with the
// next call. Without a CA, a bearer token goes only to servers on this host: gRPC closes
// connections to addresses other than loopback. INVALID_ARGUMENT: a certificate or server name
// without a CA, or files that are not what they should be. NOT_FOUND and the like: a file cannot be
// read.
absl::StatusOr<ChannelSecurity> MakeChannelSecurity(const ChannelSecurityOptions& options);

// The bearer token in a file: one word of printable ASCII. `what` names the file in errors.
absl::StatusOr<std::string> ReadToken(const std::string& what, const std::string& path);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CHANNEL_SECURITY_H_
