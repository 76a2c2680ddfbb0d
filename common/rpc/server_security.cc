// Chooses credentials and gate from the settings.
#include "common/rpc/server_security.h"

#include <arpa/inet.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

absl::Status CheckPlaintext(const ServerSecurityOptions& options, const std::string& host) {
  if (!options.tls.ca.empty()) {
    return absl::InvalidArgumentError("--tls_client_ca: expected --tls_cert and --tls_key with it");
  }
  if (IsLoopback(host)) return absl::OkStatus();
  const std::string where = absl::StrCat("other hosts can connect to --host=", host);
  if (!options.access_file.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        where,
        ", so --access_file needs --tls_cert and --tls_key: else anybody can read bearer tokens"));
  }
  if (options.has_admin_port) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ", so --admin_port needs --tls_cert and --tls_key"));
  }
  if (!options.insecure) {
    return absl::InvalidArgumentError(
        absl::StrCat(where,
                     ": expected --tls_cert and --tls_key, or --insecure for plain text without "
                     "passwords, to all who can connect"));
  }
  ISOBIT_LOG(Warning) << "--insecure: plain text, and everybody who reaches " << host
                      << " may do everything, also change the weights";
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> CredentialsFor(
    Listener listener, const ServerSecurityOptions& options, CallGate& gate) {
  if (!options.tls.certificate.empty()) {
    return TlsCredentials(options.tls, gate.CheckFor(listener), gate.HiddenHeaderOf(listener));
  }
  if (gate.checks_calls()) {
    return LoopbackCredentials(gate.CheckFor(listener), gate.HiddenHeaderOf(listener));
  }
  return grpc::InsecureServerCredentials();
}

}  // namespace

bool IsLoopback(const std::string& host) {
  in_addr v4 = {};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  return host == "localhost" || host == "::1" || host == "[::1]";
}

absl::StatusOr<ServerSecurity> MakeServerSecurity(const ServerSecurityOptions& options,
                                                  const std::string& host) {
  ISOBIT_RETURN_IF_ERROR(ReadTlsPems(options.tls).status());
  if (options.tls.certificate.empty()) ISOBIT_RETURN_IF_ERROR(CheckPlaintext(options, host));
  CallGateOptions gate;
  if (!options.access_file.empty()) {
    ISOBIT_ASSIGN_OR_RETURN(gate.access, AccessFile::Open(options.access_file));
  }
  gate.quota = Quota::Create(options.each, options.all);
  ISOBIT_ASSIGN_OR_RETURN(gate.audit, AuditLog::Open(options.audit_log));
  gate.has_admin_port = options.has_admin_port;
  ServerSecurity security;
  security.tls = options.tls;
  security.is_tls = !options.tls.certificate.empty();
  security.is_insecure = options.insecure;
  security.gate = CallGate::Create(std::move(gate));
  ISOBIT_ASSIGN_OR_RETURN(security.credentials,
                          CredentialsFor(Listener::kMain, options, *security.gate));
  ISOBIT_ASSIGN_OR_RETURN(security.admin_credentials,
                          CredentialsFor(Listener::kAdmin, options, *security.gate));
  return security;
}

}  // namespace isobit
