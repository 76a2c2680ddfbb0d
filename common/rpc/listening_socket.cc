// Looks up, binds and listens.
#include "common/rpc/listening_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/rpc/channel.h"
#include "common/rpc/limits.h"

namespace isobit {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

absl::StatusOr<Addresses> AddressesOf(std::string host) {
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat("host \"", host, "\": ", gai_strerror(error)));
  }
  return Addresses(found, &freeaddrinfo);
}

void SetPort(sockaddr* address, int port) {
  const in_port_t wire = htons(static_cast<uint16_t>(port));
  if (address->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = wire;
  } else {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = wire;
  }
}

int PortOf(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

bool Set(int socket, int level, int option, int value) {
  return setsockopt(socket, level, option, &value, sizeof value) == 0;
}

// A socket that listens at `address`, or none and errno.
Descriptor Listen(const addrinfo& address) {
  Descriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.is_open()) return socket;
  // Accepted sockets inherit the last two options. Without the last, the connection of a caller
  // that has vanished with unread data stays for a quarter of an hour.
  const bool ok = Set(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1) &&
                  (address.ai_family != AF_INET6 ||
                   Set(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY,
                       !IN6_IS_ADDR_UNSPECIFIED(
                           &reinterpret_cast<sockaddr_in6*>(address.ai_addr)->sin6_addr))) &&
                  Set(socket.get(), IPPROTO_TCP, TCP_NODELAY, 1) &&
                  Set(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, kKeepaliveTimeoutMs) &&
                  bind(socket.get(), address.ai_addr, address.ai_addrlen) == 0 &&
                  listen(socket.get(), SOMAXCONN) == 0;
  const int error = errno;
  if (!ok) socket.Close();
  errno = error;
  return socket;
}

}  // namespace

absl::StatusOr<ListeningSockets> ListenOn(const std::string& host, int port) {
  if (port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("port: ", port, ", expected 0 to 65535"));
  }
  ISOBIT_ASSIGN_OR_RETURN(const Addresses addresses, AddressesOf(host));
  ListeningSockets listening{.sockets = {}, .port = port};
  int error = 0;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    SetPort(address->ai_addr, listening.port);  // all get the port that the first one got
    Descriptor socket = Listen(*address);
    if (!socket.is_open()) {
      error = errno;
      // A name may stand for an address that this machine does not have, such as ::1.
      if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) continue;
      break;
    }
    listening.port = PortOf(socket.get());
    listening.sockets.push_back(std::move(socket));
    error = 0;
  }
  if (listening.sockets.empty() ||
      (error != 0 && error != EADDRNOTAVAIL && error != EAFNOSUPPORT)) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", HostAndPort(host, listening.port), ": ", std::strerror(error)));
  }
  return listening;
}

}  // namespace isobit
