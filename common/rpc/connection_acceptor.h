// Accepts TCP connections for a gRPC server. gRPC's own listener (1.51) stops forever when an
// accept fails for the first time because no descriptor is free. This one bounds the number of
// connections and recovers from every error.
//
//   ISOBIT_ASSIGN_OR_RETURN(auto acceptor, ConnectionAcceptor::Listen(options));
//   acceptor->AttachTo(builder, credentials);
//   server = builder.BuildAndStart();
//   acceptor->Start();
//   ...
//   acceptor->Stop();            // before the server's Shutdown
//   acceptor->EndConnections();  // then, too
#ifndef ISOBIT_COMMON_RPC_CONNECTION_ACCEPTOR_H_
#define ISOBIT_COMMON_RPC_CONNECTION_ACCEPTOR_H_

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/access/open_connections.h"
#include "common/base/descriptor.h"
#include "common/metrics/metrics.h"

namespace isobit {

// Raises the process's soft limit of descriptors to the hard one, at most to 65,536, and returns
// the limit in force.
int64_t RaiseDescriptorLimit();

class ConnectionAcceptor {
 public:
  struct Options {
    // An IPv4 or IPv6 address, or a name (then all its addresses). "::" includes IPv4.
    std::string host = "127.0.0.1";
    // In [0, 65535]; 0 lets the system choose.
    int port = 0;
    // Open connections, in [1, descriptor limit - kReservedDescriptors]. 0: half of the limit, at
    // most kDefaultMaxConnections. Further connections are accepted and closed at once.
    int64_t max_connections = 0;
    // How many of these one address may have (open_connections.h), at least 1, so that one stranger
    // cannot take them all. 0: a quarter; then loopback has no bound, since all callers have that
    // address if the service or its proxy listens there.
    int64_t max_connections_per_address = 0;
    // Counts the connections, under the name `listener`.
    std::shared_ptr<Metrics> metrics = std::make_shared<Metrics>();
    std::string listener = "main";
  };
  static constexpr int64_t kDefaultMaxConnections = 4096;
  // Descriptors left for everything else: files, event queues, connections to other services.
  static constexpr int64_t kReservedDescriptors = 64;

  // Binds and listens, without SO_REUSEPORT, so that no other process can share the port. Accepts
  // nothing until Start. INVALID_ARGUMENT: the port or a number of connections is out of range.
  // UNAVAILABLE: an address cannot be found or bound.
  static absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Listen(const Options& options);

  ConnectionAcceptor(const ConnectionAcceptor&) = delete;
  ConnectionAcceptor& operator=(const ConnectionAcceptor&) = delete;
  // Calls Stop.
  ~ConnectionAcceptor();

  // Gives connections to the server that `builder` makes, with `credentials`. Call it once.
  void AttachTo(grpc::ServerBuilder& builder, std::shared_ptr<grpc::ServerCredentials> credentials);

  // Starts accepting, on a thread of its own. Call it after the server has started.
  void Start();

  // Stops accepting and frees the port; open connections stay. Call it before the server's
  // Shutdown: a connection that the server gets later would leak.
  void Stop();

  // Ends all open connections: to their callers it looks as if the process had ended. What was
  // written before still arrives. Call it after Stop.
  void EndConnections() { connections_.End(); }

  int port() const { return port_; }
  int64_t max_connections() const { return max_connections_; }

 private:
  ConnectionAcceptor(const Options& options, int64_t max_connections);

  void AcceptUntilStopped();
  // Accepts the connections that wait at `listener`. False: the system currently lacks a descriptor
  // or memory for more.
  bool AcceptAll(int listener);
  // Hands `connection` over, or closes it if there are too many.
  void Adopt(Descriptor connection, const sockaddr_storage& caller);
  // After an accept that failed with `error`: accepts one connection and closes it.
  void RefuseOne(int error, int listener);
  void LogRefused(absl::string_view reason);

  const int64_t max_connections_;
  const std::shared_ptr<Metrics> metrics_;  // the next two are its metrics
  prometheus::Counter& num_accepted_;
  prometheus::Counter& num_refused_;
  int port_ = 0;
  std::vector<Descriptor> listeners_;
  Descriptor wake_;   // an eventfd: ends the thread
  Descriptor spare_;  // closed to free a descriptor for refusing a connection
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> server_;

  OpenConnections connections_;
  std::chrono::steady_clock::time_point next_log_;
  double num_logged_ = 0;  // the part of num_refused_ that is logged
  std::thread thread_;     // while it runs, only it uses the three above
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CONNECTION_ACCEPTOR_H_
