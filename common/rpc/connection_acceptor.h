// Accepts TCP connections for a gRPC server. gRPC's own listener (1.51) stops for good when an
// accept first fails because no descriptor is free. This one bounds the number of connections and
// recovers from every error.
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
#include "common/base/descriptor.h"
#include "common/metrics/metrics.h"
#include "common/rpc/open_connections.h"

namespace isobit {

// Raises the process's soft limit of descriptors to the hard one, at most 65,536, and returns the
// limit that then holds.
int64_t RaiseDescriptorLimit();

class ConnectionAcceptor {
 public:
  struct Options {
    // An IPv4 or IPv6 address, or a name: every address that it stands for. "::" takes IPv4, too.
    std::string host = "127.0.0.1";
    // In [0, 65535]; 0 lets the system choose.
    int port = 0;
    // Connections open at one time, in [1, descriptor limit - kReservedDescriptors]. 0: half of the
    // limit, at most kDefaultMaxConnections. Further connections are accepted and closed at once.
    int64_t max_connections = 0;
    // How many of these one address may have (open_connections.h), at least 1, so that one stranger
    // cannot take them all. 0: a quarter, and no bound for loopback: if the service or its proxy
    // listens there, all callers have that address.
    int64_t max_connections_per_address = 0;
    // Counts the connections, as those of `listener`.
    std::shared_ptr<Metrics> metrics = std::make_shared<Metrics>();
    std::string listener = "main";
  };
  static constexpr int64_t kDefaultMaxConnections = 4096;
  // Descriptors left for everything else: files, event queues, connections to other services.
  static constexpr int64_t kReservedDescriptors = 64;

  // Binds and listens, without SO_REUSEPORT, so that no other process can share the port. Nothing
  // is accepted until Start. INVALID_ARGUMENT: port or a number of connections out of range.
  // UNAVAILABLE: an address cannot be found or bound.
  static absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Listen(const Options& options);

  ConnectionAcceptor(const ConnectionAcceptor&) = delete;
  ConnectionAcceptor& operator=(const ConnectionAcceptor&) = delete;
  // Calls Stop.
  ~ConnectionAcceptor();

  // Connections go to the server that `builder` makes, with `credentials`. Call it once.
  void AttachTo(grpc::ServerBuilder& builder, std::shared_ptr<grpc::ServerCredentials> credentials);

  // Starts accepting, on a thread of its own. Call it after the server has started.
  void Start();

  // Stops accepting and frees the port; open connections stay. Call it before the server's
  // Shutdown: a connection that the server gets later would leak.
  void Stop();

  // Tells the callers of all open connections that nothing more comes: for them they have ended,
  // as if the process had. What was written before still arrives. Call it after Stop.
  void EndConnections() { connections_.End(); }

  int port() const { return port_; }
  int64_t max_connections() const { return max_connections_; }

 private:
  ConnectionAcceptor(const Options& options, int64_t max_connections);

  void AcceptUntilStopped();
  // Accepts the connections that wait at `listener`. False: the system has no descriptor or memory
  // for more at present.
  bool AcceptAll(int listener);
  // Hands `connection` over, or closes it when there are too many.
  void Adopt(Descriptor connection, const sockaddr_storage& caller);
  // Accepts and closes one, after an accept that failed with `error`.
  void RefuseOne(int error, int listener);
  void LogRefused(absl::string_view reason);

  const int64_t max_connections_;
  const std::shared_ptr<Metrics> metrics_;  // has the two below
  prometheus::Counter& num_accepted_;
  prometheus::Counter& num_refused_;
  int port_ = 0;
  std::vector<Descriptor> listeners_;
  Descriptor wake_;   // an eventfd: ends the thread
  Descriptor spare_;  // closed to free a descriptor for refusing a connection
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> server_;

  OpenConnections connections_;
  std::chrono::steady_clock::time_point next_log_;
  double num_logged_ = 0;  // of num_refused_
  std::thread thread_;     // the only one to use the three above, while it runs
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CONNECTION_ACCEPTOR_H_
