// The connections that a listener has open: how many in total, and how many from each address.
#ifndef ISOBIT_COMMON_ACCESS_OPEN_CONNECTIONS_H_
#define ISOBIT_COMMON_ACCESS_OPEN_CONNECTIONS_H_

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"

namespace isobit {

// A caller's address, precise enough to tell hosts apart.
struct CallerAddress {
  // An IPv4 address, also if mapped into IPv6; else the first 64 bits of an IPv6 address, since a
  // host may have all addresses that begin with them.
  std::string name;
  bool is_loopback = false;
};
CallerAddress CallerAddressOf(const sockaddr_storage& caller);

// Not thread-safe.
class OpenConnections {
 public:
  // max_total, max_of_address: at least 1.
  OpenConnections(int64_t max_total, int64_t max_of_address, bool exempts_loopback);

  // Counts `socket`, which was just accepted from `caller` and which stays open as long as the
  // connection is used. RESOURCE_EXHAUSTED, naming the bound: there are too many connections, in
  // total or from this address.
  absl::Status Add(int socket, const CallerAddress& caller);

  // Ends what all open connections send to their callers, after what has been written.
  void End();

 private:
  struct Connection {
    uint64_t inode;
    std::string address;
  };

  absl::Status CheckRoom(const CallerAddress& caller) const;
  // Forgets connections that have gone, unless it has just done so.
  void Sweep();
  void Forget(const Connection& connection);

  const int64_t max_total_, max_of_address_;
  const bool exempts_loopback_;
  // By descriptor. gRPC closes the sockets: if a descriptor now has another inode, its connection
  // has gone.
  std::unordered_map<int, Connection> connections_;
  std::unordered_map<std::string, int64_t> num_by_address_;  // entries that become 0 are removed
  std::chrono::steady_clock::time_point next_sweep_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_ACCESS_OPEN_CONNECTIONS_H_
