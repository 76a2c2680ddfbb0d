// TCP sockets that listen.
#ifndef ISOBIT_COMMON_RPC_LISTENING_SOCKET_H_
#define ISOBIT_COMMON_RPC_LISTENING_SOCKET_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/descriptor.h"

namespace isobit {

struct ListeningSockets {
  std::vector<Descriptor> sockets;  // at least one; non-blocking, closed on exec
  int port = 0;                     // of them all
};

// Listens on every address that `host` stands for: an IPv4 or IPv6 address ("::" takes IPv4, too)
// or a name. port: 0 lets the system choose. No other process can share the port. Accepted
// connections send without delay (TCP_NODELAY). INVALID_ARGUMENT: a port outside [0, 65535].
// UNAVAILABLE: the host is not known, or an address of it cannot be bound.
absl::StatusOr<ListeningSockets> ListenOn(const std::string& host, int port);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_LISTENING_SOCKET_H_
