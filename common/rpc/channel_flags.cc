// Defines the flags. A library of its own, so that a binary that calls nobody does not have them.
#include "common/rpc/channel_flags.h"

#include <string>

#include "absl/flags/flag.h"

ABSL_FLAG(std::string, upstream_tls_ca, "",
          "Call other services over TLS, and trust this CA (PEM). Files of the upstream flags are "
          "read again when they change.");
ABSL_FLAG(std::string, upstream_tls_cert, "",
          "This process's own certificate for them (PEM, with its chain).");
ABSL_FLAG(std::string, upstream_tls_key, "",
          "The key of --upstream_tls_cert (PEM, no passphrase).");
ABSL_FLAG(std::string, upstream_tls_server_name, "",
          "Name that their certificates must have; empty: the host in their address.");
ABSL_FLAG(std::string, upstream_token_file, "",
          "File with the bearer token for calls to them; without TLS it goes only to this host.");

namespace isobit {

absl::StatusOr<ChannelSecurity> ChannelSecurityFromFlags() {
  ChannelSecurityOptions options;
  options.tls = {.certificate = absl::GetFlag(FLAGS_upstream_tls_cert),
                 .key = absl::GetFlag(FLAGS_upstream_tls_key),
                 .ca = absl::GetFlag(FLAGS_upstream_tls_ca),
                 .certificate_flag = "--upstream_tls_cert",
                 .key_flag = "--upstream_tls_key",
                 .ca_flag = "--upstream_tls_ca"};
  options.server_name = absl::GetFlag(FLAGS_upstream_tls_server_name);
  options.token_file = absl::GetFlag(FLAGS_upstream_token_file);
  return MakeChannelSecurity(options);
}

}  // namespace isobit
