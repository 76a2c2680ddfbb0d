// Defines the server flags.
#include "common/rpc/server_flags.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"

ABSL_FLAG(std::string, host, "127.0.0.1",
          "Address to listen on. Any but loopback needs --tls_cert and --tls_key, or --insecure.");
ABSL_FLAG(int, port, 0, "TCP port to listen on; 0 lets the system choose one.");
ABSL_FLAG(int64_t, max_connections, 0,
          "Client connections open at one time; more are closed at once. 0: half of the process's "
          "limit of descriptors, at most 4096.");
ABSL_FLAG(
    int64_t, max_connections_per_address, 0,
    "How many of --max_connections one address may have (of an IPv6 address, the first 64 bits "
    "count). 0: a quarter, and any number from loopback.");
ABSL_FLAG(int, max_connection_age_s, 0,
          "Seconds after which a connection takes no more calls, so that clients connect anew and "
          "spread over all replicas behind one address; calls in flight go on. 0: never.");
ABSL_FLAG(std::string, port_file, "",
          "If set, the bound port is written to this file once the server listens, and those of "
          "--admin_port and --metrics_port to the same name with .admin or .metrics after it.");
ABSL_FLAG(int, drain_timeout_ms, 30000,
          "How many milliseconds calls in flight may take to finish after SIGTERM or SIGINT; those "
          "that do not end with UNAVAILABLE.");
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
    "A separate port for the methods that need the role admin, which --port then refuses; 0 lets "
    "the system choose one.");
ABSL_FLAG(std::optional<int>, metrics_port, std::nullopt,
          "A port for HTTP, or HTTPS with --tls_cert, where Prometheus reads /metrics; 0 lets the "
          "system choose one.");
ABSL_FLAG(std::vector<std::string>, http_hosts, {},
          "Names, separated by commas, by which HTTP ports may be called, beside localhost, "
          "addresses and --host; others are refused, so that no site can read them through a "
          "reader's browser. *: every name.");
ABSL_FLAG(std::string, audit_log, "",
          "File that gets a line for each admin call; empty: the lines go to the log.");
ABSL_FLAG(double, max_client_share, 0.5,
          "Share of each bound on memory that one client may take: of --max_calls_mb, or of "
          "--max_requests_mb and --max_unread_mb.");
ABSL_FLAG(
    int64_t, max_client_requests, 4096,
    "The most calls that one client may have in flight. A client is one of --access_file, else "
    "one certificate or address.");
ABSL_FLAG(int64_t, max_client_streams, 4096, "The most streams that one client may have open.");
ABSL_FLAG(int64_t, max_client_tokens, int64_t{1} << 28,
          "The most tokens that one client's calls in flight may bring and generate, together.");
ABSL_FLAG(int64_t, max_total_requests, 16384,
          "The most calls that all clients may have in flight.");
ABSL_FLAG(int64_t, max_total_streams, 16384, "The most streams that all clients may have open.");
ABSL_FLAG(int64_t, max_total_tokens, int64_t{1} << 29,
          "The most tokens that all clients' calls in flight may bring and generate, together.");

namespace isobit {
namespace {

// The most that a quota flag may say, so that sums stay far from overflow.
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

// Checks what would otherwise be noticed only after the model is loaded.
absl::Status CheckListening(const ServerOptions& options) {
  ISOBIT_RETURN_IF_ERROR(RequireInRange("port", options.port, 0, 65535));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("admin_port", options.admin_port.value_or(0), 0, 65535));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("max_connection_age_s", options.max_connection_age.count(), 0, 1 << 20));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("metrics_port", options.metrics_port.value_or(0), 0, 65535));
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
  options.metrics_port = absl::GetFlag(FLAGS_metrics_port);
  options.http_hosts = absl::GetFlag(FLAGS_http_hosts);
  options.host = absl::GetFlag(FLAGS_host);
  options.port = absl::GetFlag(FLAGS_port);
  options.max_connections = absl::GetFlag(FLAGS_max_connections);
  options.max_connections_per_address = absl::GetFlag(FLAGS_max_connections_per_address);
  options.max_connection_age = std::chrono::seconds(absl::GetFlag(FLAGS_max_connection_age_s));
  options.port_file = absl::GetFlag(FLAGS_port_file);
  options.drain_timeout = std::chrono::milliseconds(absl::GetFlag(FLAGS_drain_timeout_ms));
  ISOBIT_RETURN_IF_ERROR(CheckListening(options));
  return options;
}

}  // namespace isobit
