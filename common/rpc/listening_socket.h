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
  int port = 0;                     // the same for all
};

// Listens on every address of `host`, an IPv4 or IPv6 address ("::" includes IPv4) or a name. port:
// 0 lets the system choose. No other process can share the port. Accepted connections send without
// delay (TCP_NODELAY). INVALID_ARGUMENT: the port is outside [0, 65535]. UNAVAILABLE: the host is
// unknown, or an address of it cannot be bound.
absl::StatusOr<ListeningSockets> ListenOn(const std::string& host, int port);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_LISTENING_SOCKET_H_
