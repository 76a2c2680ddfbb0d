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
  TlsFiles tls{};             // with a CA: TLS; certificate and key are one's own, for mTLS
  std::string server_name{};  // that certificates of servers must have; empty: the address's
  std::string token_file{};   // its token goes with every call; empty: none
};

struct ChannelSecurity {
  std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr;  // null: plain text
  std::string server_name{};
};

// Files that change are taken up: certificates within a second, for new connections (a pair that
// does not match makes these fail until it does), the token at the next call. Without a CA a token
// goes to this host's servers alone: gRPC closes connections to other than loopback addresses.
// INVALID_ARGUMENT: a certificate or server name without a CA, or files that are not what they
// should be. NOT_FOUND and the like: a file cannot be read.
absl::StatusOr<ChannelSecurity> MakeChannelSecurity(const ChannelSecurityOptions& options);

// The token in a file: one word of printable ASCII. `what` names the file in errors.
absl::StatusOr<std::string> ReadToken(const std::string& what, const std::string& path);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CHANNEL_SECURITY_H_
