// How this process calls other services: by TLS or plain text, and with which identity.
#ifndef ISOBIT_COMMON_RPC_CHANNEL_SECURITY_H_
#define ISOBIT_COMMON_RPC_CHANNEL_SECURITY_H_

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/rpc/tls_files.h"

namespace isobit {

struct ChannelSecurityOptions {
  TlsFiles tls{};             // with a CA: TLS; with certificate and key: mTLS
  std::string server_name{};  // in servers' certificates; empty: the address's host
  std::string token_file{};   // of the bearer token for all calls; empty: none
};

struct ChannelSecurity {
  std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr;  // null: plain text
  std::string server_name{};
};

// Files are read again when they change. New certificates are used for new connections within a
// second; while certificate and key do not match, new connections fail. A new bearer token is used
// from the next call on. Without a CA, a bearer token goes only to servers on this host: gRPC
// closes connections to other addresses than loopback. INVALID_ARGUMENT: there is a certificate or
// server name but no CA, or a file has no valid content. NOT_FOUND and others: a file cannot be
// read.
absl::StatusOr<ChannelSecurity> MakeChannelSecurity(const ChannelSecurityOptions& options);

// The bearer token in a file: one word of printable ASCII. `what` names the file in errors.
absl::StatusOr<std::string> ReadToken(const std::string& what, const std::string& path);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CHANNEL_SECURITY_H_
