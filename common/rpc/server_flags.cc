// Defines the server flags.
#include "common/rpc/server_flags.h"

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/flags/flag.h"

ABSL_FLAG(std::string, host, "127.0.0.1", "Address to listen on.");
ABSL_FLAG(int, port, 0, "TCP port to listen on; 0 lets the system choose one.");
ABSL_FLAG(int64_t, max_connections, 0,
          "Client connections open at one time; more are closed at once. 0: half of the process's "
          "limit of descriptors, at most 4096.");
ABSL_FLAG(std::string, port_file, "",
          "If set, the file that gets the bound port once the server listens.");
ABSL_FLAG(int, drain_timeout_ms, 30000,
          "How many milliseconds calls in flight may take to finish after SIGTERM or SIGINT.");

namespace isobit {

ServerOptions ServerOptionsFromFlags() {
  ServerOptions options;
  options.host = absl::GetFlag(FLAGS_host);
  options.port = absl::GetFlag(FLAGS_port);
  options.max_connections = absl::GetFlag(FLAGS_max_connections);
  options.port_file = absl::GetFlag(FLAGS_port_file);
  options.drain_timeout = std::chrono::milliseconds(absl::GetFlag(FLAGS_drain_timeout_ms));
  return options;
}

}  // namespace isobit
