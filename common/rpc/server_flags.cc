// Defines the server flags.
#include "common/rpc/server_flags.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"

ABSL_FLAG(std::string, host, "127.0.0.1",
          "Address to listen on. Other than loopback needs --tls_cert and --tls_key, or "
          "--insecure.");
ABSL_FLAG(int, port, 0, "TCP port to listen on; 0 lets the system choose one.");
ABSL_FLAG(int64_t, max_connections, 0,
          "Client connections open at one time; more are closed at once. 0: half of the process's "
          "limit of descriptors, at most 4096.");
ABSL_FLAG(int64_t, max_connections_per_address, 0,
          "Of --max_connections, those of one address (of IPv6: of its first 64 bits). 0: a "
          "quarter, and any number from loopback.");
ABSL_FLAG(std::string, port_file, "",
          "If set, the file that gets the bound port once the server listens; PATH.admin gets that "
          "of --admin_port.");
ABSL_FLAG(int, drain_timeout_ms, 30000,
          "How many milliseconds calls in flight may take to finish after SIGTERM or SIGINT.");
ABSL_FLAG(std::string, tls_cert, "",
          "Serve TLS with this certificate (PEM, with its chain). Files of these three flags are "
          "read again when they change.");
ABSL_FLAG(std::string, tls_key, "", "The key of --tls_cert (PEM, no passphrase).");
ABSL_FLAG(std::string, tls_client_ca, "",
          "Only clients with a certificate of this CA (PEM) may connect.");
ABSL_FLAG(bool, insecure, false,
          "Serve plain text to other hosts, too: everybody who can connect may do everything.");
ABSL_FLAG(std::string, access_file, "",
          "JSON file of the clients that may call, and their roles (docs/API.md); read again when "
          "it changes. Empty: everybody who can connect may do everything.");
ABSL_FLAG(
    std::optional<int>, admin_port, std::nullopt,
    "A port of its own for what takes the role admin, which is then not at --port; 0 lets the "
    "system choose.");
ABSL_FLAG(std::string, audit_log, "",
          "File that gets a line for each admin call; empty: the log gets them.");
ABSL_FLAG(double, max_client_share, 0.5,
          "Part that one client may take of each bound on memory: --max_calls_mb, or "
          "--max_requests_mb and --max_unread_mb.");
ABSL_FLAG(int64_t, max_client_requests, 4096,
          "Calls in flight of one client: one of --access_file, else of one certificate or "
          "address.");
ABSL_FLAG(int64_t, max_client_streams, 4096, "Streams open of one client.");
ABSL_FLAG(int64_t, max_client_tokens, int64_t{1} << 28,
          "Tokens that the calls in flight of one client bring and may generate.");
ABSL_FLAG(int64_t, max_total_requests, 16384, "Calls in flight of all clients.");
ABSL_FLAG(int64_t, max_total_streams, 16384, "Streams open of all clients.");
ABSL_FLAG(int64_t, max_total_tokens, int64_t{1} << 29,
          "Tokens that the calls in flight of all clients bring and may generate.");

namespace isobit {
namespace {

// What no flag of a quota may exceed, far from where sums would wrap.
constexpr int64_t kMost = int64_t{1} << 60;

absl::StatusOr<ServerSecurityOptions> SecurityFromFlags() {
  ServerSecurityOptions options;
  options.tls.certificate = absl::GetFlag(FLAGS_tls_cert);
  options.tls.key = absl::GetFlag(FLAGS_tls_key);
  options.tls.ca = absl::GetFlag(FLAGS_tls_client_ca);
  options.access_file = absl::GetFlag(FLAGS_access_file);
  options.audit_log = absl::GetFlag(FLAGS_audit_log);
  options.insecure = absl::GetFlag(FLAGS_insecure);
  options.has_admin_port = absl::GetFlag(FLAGS_admin_port).has_value();
  options.each = {.requests = absl::GetFlag(FLAGS_max_client_requests),
                  .streams = absl::GetFlag(FLAGS_max_client_streams),
                  .tokens = absl::GetFlag(FLAGS_max_client_tokens)};
  options.all = {.requests = absl::GetFlag(FLAGS_max_total_requests),
                 .streams = absl::GetFlag(FLAGS_max_total_streams),
                 .tokens = absl::GetFlag(FLAGS_max_total_tokens)};
  const std::pair<const char*, int64_t> amounts[] = {
      {"max_client_requests", options.each.requests}, {"max_client_streams", options.each.streams},
      {"max_client_tokens", options.each.tokens},     {"max_total_requests", options.all.requests},
      {"max_total_streams", options.all.streams},     {"max_total_tokens", options.all.tokens}};
  for (const auto& [name, amount] : amounts) {
    ISOBIT_RETURN_IF_ERROR(RequireInRange(name, amount, 1, kMost));
  }
  return options;
}

// What could otherwise be noticed only once the model is loaded.
absl::Status CheckListening(const ServerOptions& options) {
  ISOBIT_RETURN_IF_ERROR(RequireInRange("port", options.port, 0, 65535));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("admin_port", options.admin_port.value_or(0), 0, 65535));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("drain_timeout_ms", options.drain_timeout.count(), 0, int64_t{1} << 31));
  return CheckPortFiles(options);
}

}  // namespace

absl::StatusOr<ByteLimits> ByteLimitsFromFlags(const char* flag, int64_t mib) {
  return ByteLimitsOf(flag, mib, absl::GetFlag(FLAGS_max_client_share));
}

absl::StatusOr<ServerOptions> ServerOptionsFromFlags() {
  ServerOptions options;
  ISOBIT_ASSIGN_OR_RETURN(const ServerSecurityOptions security, SecurityFromFlags());
  ISOBIT_ASSIGN_OR_RETURN(options.security,
                          MakeServerSecurity(security, absl::GetFlag(FLAGS_host)));
  options.admin_port = absl::GetFlag(FLAGS_admin_port);
  options.host = absl::GetFlag(FLAGS_host);
  options.port = absl::GetFlag(FLAGS_port);
  options.max_connections = absl::GetFlag(FLAGS_max_connections);
  options.max_connections_per_address = absl::GetFlag(FLAGS_max_connections_per_address);
  options.port_file = absl::GetFlag(FLAGS_port_file);
  options.drain_timeout = std::chrono::milliseconds(absl::GetFlag(FLAGS_drain_timeout_ms));
  ISOBIT_RETURN_IF_ERROR(CheckListening(options));
  return options;
}

}  // namespace isobit
