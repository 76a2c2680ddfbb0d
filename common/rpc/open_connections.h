// The connections that a listener has open: how many in all, and how many of each address.
#ifndef ISOBIT_COMMON_RPC_OPEN_CONNECTIONS_H_
#define ISOBIT_COMMON_RPC_OPEN_CONNECTIONS_H_

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"

namespace isobit {

// The address of a caller, as far as it tells hosts apart.
struct CallerAddress {
  // An IPv4 address, also of IPv4 in IPv6; or the first 64 bits of an IPv6 address, as one host may
  // have all addresses that begin with them.
  std::string name;
  bool is_loopback = false;
};
CallerAddress CallerAddressOf(const sockaddr_storage& caller);

// Not thread-safe.
class OpenConnections {
 public:
  // max_total, max_of_address: at least 1.
  OpenConnections(int64_t max_total, int64_t max_of_address, bool exempts_loopback);

  // Counts `socket`, which the caller has just accepted from `caller` and does not close while it
  // is open elsewhere. RESOURCE_EXHAUSTED, naming the bound: there are too many, in all or of the
  // address.
  absl::Status Add(int socket, const CallerAddress& caller);

  // Ends what goes to the callers of all open connections, after what has been written.
  void End();

 private:
  struct Connection {
    uint64_t inode;
    std::string address;
  };

  absl::Status CheckRoom(const CallerAddress& caller) const;
  // Forgets connections that are gone, unless it did so a moment ago.
  void Sweep();
  void Forget(const Connection& connection);

  const int64_t max_total_, max_of_address_;
  const bool exempts_loopback_;
  // By descriptor. gRPC closes the sockets: a connection whose descriptor has another inode now is
  // gone.
  std::unordered_map<int, Connection> connections_;
  std::unordered_map<std::string, int64_t> num_by_address_;  // none is 0
  std::chrono::steady_clock::time_point next_sweep_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_OPEN_CONNECTIONS_H_
