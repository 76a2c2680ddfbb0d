// Accepts TCP connections for a gRPC server. gRPC's own listener (1.51) stops for good at the first
// accept that fails for want of a descriptor; this one has a cap and recovers from everything.
//
//   ISOBIT_ASSIGN_OR_RETURN(auto acceptor, ConnectionAcceptor::Listen(options));
//   acceptor->AttachTo(builder, credentials);
//   server = builder.BuildAndStart();
//   acceptor->Start();
//   ...
//   acceptor->Stop();      // before the server's Shutdown
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
    // limit, at most kDefaultMaxConnections. What comes beyond is accepted and closed at once.
    int64_t max_connections = 0;
    // Of these, how many may be of one address (open_connections.h), at least 1: one stranger must
    // not take all places. 0: a quarter, and any number from loopback, where all callers of a
    // service that listens there, or has its proxy there, have one address.
    int64_t max_connections_per_address = 0;
    // Counts the connections, as those of `listener`.
    std::shared_ptr<Metrics> metrics = std::make_shared<Metrics>();
    std::string listener = "main";
  };
  static constexpr int64_t kDefaultMaxConnections = 4096;
  // Left for all that are no connections: files, event queues, connections to other services.
  static constexpr int64_t kReservedDescriptors = 64;

  // Binds and listens, without SO_REUSEPORT, so that no other process can share the port. Nothing
  // is accepted until Start. INVALID_ARGUMENT: port or a number of connections out of range.
  // UNAVAILABLE: an address cannot be found or bound.
  static absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Listen(const Options& options);

  ConnectionAcceptor(const ConnectionAcceptor&) = delete;
  ConnectionAcceptor& operator=(const ConnectionAcceptor&) = delete;
  // Stops, unless that is done.
  ~ConnectionAcceptor();

  // Lets the server that `builder` makes have the connections, through `credentials`. Once.
  void AttachTo(grpc::ServerBuilder& builder, std::shared_ptr<grpc::ServerCredentials> credentials);

  // Accepts, on a thread of its own, from when the server has been started.
  void Start();

  // Accepts no more, and frees the port. Connections live on. Once it returns the server may shut
  // down, as it would leak what it were handed then.
  void Stop();

  int port() const { return port_; }
  int64_t max_connections() const { return max_connections_; }

 private:
  ConnectionAcceptor(const Options& options, int64_t max_connections);

  void AcceptUntilStopped();
  // Takes what waits at `listener`. False: the system has no descriptor or memory for more now.
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
  Descriptor spare_;  // closed to have a descriptor with which to refuse, when there is no other
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> server_;

  OpenConnections connections_;
  std::chrono::steady_clock::time_point next_log_;
  double num_logged_ = 0;  // of num_refused_
  std::thread thread_;     // alone uses the three above
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CONNECTION_ACCEPTOR_H_
