// How the command line protects a server: TLS or plain text, who may call, how much a client may
// hold.
#ifndef ISOBIT_COMMON_RPC_SERVER_SECURITY_H_
#define ISOBIT_COMMON_RPC_SERVER_SECURITY_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/access/call_gate.h"
#include "common/access/quota.h"
#include "common/rpc/tls_files.h"

namespace isobit {

struct ServerSecurityOptions {
  TlsFiles tls{};             // plain text if there is no certificate
  std::string access_file{};  // empty: every caller may do everything
  std::string audit_log{};    // empty: audit lines go to the log
  bool insecure = false;      // plain text even if other hosts can connect
  bool has_admin_port = false;
  QuotaAmounts each{}, all{};  // what one client, and all together, may hold
};

struct ServerSecurity {
  std::shared_ptr<CallGate> gate;
  std::shared_ptr<grpc::ServerCredentials> credentials;        // of the main port
  std::shared_ptr<grpc::ServerCredentials> admin_credentials;  // of the admin port
  TlsFiles tls;                                                // used by the credentials
  bool is_tls = false, is_insecure = false;
};

// Whether only this host's processes can reach `host`: localhost, 127.x.x.x or ::1.
bool IsLoopback(const std::string& host);

// For a server that listens on `host`. INVALID_ARGUMENT: plain text on a host that is not loopback,
// unless `insecure`; bearer tokens or an admin port over plain text to other hosts, where they
// protect nothing; a CA without a certificate; a file without valid content. NOT_FOUND and others:
// a file cannot be read or written.
absl::StatusOr<ServerSecurity> MakeServerSecurity(const ServerSecurityOptions& options,
                                                  const std::string& host);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_SERVER_SECURITY_H_
