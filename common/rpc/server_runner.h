// The life of a gRPC server process: listen, serve, drain on SIGINT or SIGTERM, exit. Every service
// binary uses it, so that limits, keepalive, health and shutdown are the same.
//
//   ServerRunner runner(options);  // of ServerOptionsFromFlags
//   runner.Register(&service, v1::RolloutService::service_full_name());
//   ISOBIT_RETURN_IF_ERROR(runner.Start());
//   ... load weights ...
//   runner.SetServing(true);
//   return runner.Wait([&] { service.BeginDrain(); });  // then stop the engine
#ifndef ISOBIT_COMMON_RPC_SERVER_RUNNER_H_
#define ISOBIT_COMMON_RPC_SERVER_RUNNER_H_

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/access/call_gate.h"
#include "common/access/quota.h"
#include "common/metrics/metrics.h"
#include "common/rpc/call_count.h"
#include "common/rpc/connection_acceptor.h"
#include "common/rpc/server_security.h"

namespace isobit {

struct ServerOptions {
  // An IP address or name to listen on.
  std::string host = "127.0.0.1";
  // In [0, 65535]; 0 lets the system choose.
  int port = 0;
  // Open connections; 0: by the descriptor limit (connection_acceptor.h).
  int64_t max_connections = 0;
  // How many of these one address may have at `port`; 0: see connection_acceptor.h.
  int64_t max_connections_per_address = 0;
  // At this age a connection takes no new calls (GOAWAY), so that clients reconnect and spread over
  // all replicas; calls in flight go on. 0: no limit.
  std::chrono::seconds max_connection_age{0};
  // Who may connect and call, and how. Without credentials: every caller, in plain text.
  ServerSecurity security{};
  // Like `port`, for admin methods; `port` then refuses these.
  std::optional<int> admin_port{};
  // Like `port`, for HTTP with /metrics (common/http/metrics_page.h).
  std::optional<int> metrics_port{};
  // Names by which HTTP ports may be called (common/http/request_head.h).
  std::vector<std::string> http_hosts{};
  // If not empty, a regular file to which the bound port is written atomically, in decimal and with
  // a newline, once the server listens. The admin port and the metrics port are written to files of
  // this name plus ".admin" or ".metrics".
  std::string port_file{};
  // Also gets the server's own figures.
  std::shared_ptr<Metrics> metrics = std::make_shared<Metrics>();
  // How long calls in flight may go on after a stop
  // signal; after that they end with UNAVAILABLE.
  std::chrono::milliseconds drain_timeout{30000};
};

// INVALID_ARGUMENT: a port file exists and is not a regular file.
absl::Status CheckPortFiles(const ServerOptions& options);

// Sets the limits and keepalive of limits.h, as MakeChannel does, for a server that does not use
// ServerRunner. Sizes are bytes of one message; -1: no limit.
void SetServerArguments(grpc::ServerBuilder& builder, int max_request_bytes,
                        int max_response_bytes);

class ServerRunner {
 public:
  // Blocks SIGINT and SIGTERM in the calling thread and in all threads that it starts later, so
  // that only Wait receives them. Call it first in main.
  static void BlockStopSignals();

  explicit ServerRunner(ServerOptions options);
  ServerRunner(const ServerRunner&) = delete;
  ServerRunner& operator=(const ServerRunner&) = delete;
  // Cancels the calls that still run.
  ~ServerRunner();

  // Adds a service, which must outlive the runner, by its full proto name. Call it before Start.
  void Register(grpc::Service* service, const std::string& full_name);

  // Listens, with health and reflection, all services NOT_SERVING; then writes the port file.
  // INVALID_ARGUMENT: port, max_connections or drain timeout is out of range, or a port file is no
  // regular file. UNAVAILABLE: the address cannot be bound. RESOURCE_EXHAUSTED: no threads. UNKNOWN
  // and others: the port file cannot be written. Call it once.
  absl::Status Start();

  // The bound port, after Start.
  int port() const { return ports_.front().acceptor->port(); }

  // Sets the health of the registered services and of the server as a whole (""). Thread-safe; has
  // no effect once draining.
  void SetServing(bool serving);

  // The value of the last SetServing call; false once serving has ended. Thread-safe.
  bool is_serving();

  // Whether Wait has a reason to end. Thread-safe.
  bool is_draining();

  // Ends Wait as a stop signal would. Thread-safe.
  void Stop();

  // Ends Wait as a stop signal would, but with kExitFailed. For faults after which the process must
  // not serve, such as a device error. Thread-safe; only the first fault counts.
  void Fail(const absl::Status& fault);

  // Blocks until SIGINT, SIGTERM, Stop or Fail. Then sets NOT_SERVING, calls `drain`, waits up to
  // drain_timeout for the registered services' calls in flight, ends the rest, such as health
  // watches, and returns the exit code: kExitStopped, or kExitFailed after Fail. `drain` must end
  // open-ended streams, have new calls refused with UNAVAILABLE, and not block. Call Wait once,
  // after Start. Until the drain, it also returns memory freed by calls to the system.
  int Wait(const std::function<void()>& drain = nullptr);

 private:
  // A port and the server behind it. Each port has a server of its own, so that the gate knows at
  // which one a call came in. The services, and all that counts or bounds calls, are of both.
  struct Port {
    std::unique_ptr<ConnectionAcceptor> acceptor;
    std::unique_ptr<grpc::Server> server;
  };

  absl::Status Listen(Listener listener, const ConnectionAcceptor::Options& options);
  absl::Status StartAccepting();
  void StopAccepting();
  void SetServingLocked(bool serving);
  void Wake();
  void WaitForStop();

  const ServerOptions options_;
  std::vector<grpc::Service*> services_;
  std::vector<std::string> service_names_;
  const std::shared_ptr<CallCount> calls_ = std::make_shared<CallCount>();
  const std::unique_ptr<Metrics::Observation> calls_in_flight_;
  const std::unique_ptr<Metrics::Observation> log_lines_dropped_;
  const std::unique_ptr<Metrics::Observation> audit_lines_lost_;
  const std::shared_ptr<std::atomic<size_t>> freed_bytes_ =
      std::make_shared<std::atomic<size_t>>(0);
  const std::shared_ptr<Quota> health_watches_;
  std::vector<Port> ports_;  // after Start: the main port and, if there is one, the admin port
  int wake_fd_ = -1;         // an eventfd that Wait polls with the signals

  std::mutex mutex_;
  bool draining_ = false;  // guarded by mutex_
  bool serving_ = false;   // guarded by mutex_
  absl::Status fault_;     // guarded by mutex_
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_SERVER_RUNNER_H_
