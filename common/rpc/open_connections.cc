// Counts by address. A connection has ended if its descriptor is no longer the same socket.
#include "common/rpc/open_connections.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/stat.h>

#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/descriptor.h"

namespace isobit {
namespace {

std::optional<uint64_t> InodeOf(int socket) {
  struct stat info;
  if (fstat(socket, &info) != 0 || !S_ISSOCK(info.st_mode)) return std::nullopt;
  return info.st_ino;
}

CallerAddress OfIpv4(const in_addr& address) {
  std::array<char, INET_ADDRSTRLEN> text{};
  inet_ntop(AF_INET, &address, text.data(), text.size());
  return {.name = text.data(), .is_loopback = ntohl(address.s_addr) >> 24 == 127};
}

CallerAddress OfIpv6(in6_addr address) {
  if (IN6_IS_ADDR_V4MAPPED(&address)) {
    in_addr v4;
    std::memcpy(&v4, &address.s6_addr[12], sizeof v4);
    return OfIpv4(v4);
  }
  const bool is_loopback = IN6_IS_ADDR_LOOPBACK(&address);
  std::memset(&address.s6_addr[8], 0, 8);
  std::array<char, INET6_ADDRSTRLEN> text{};
  inet_ntop(AF_INET6, &address, text.data(), text.size());
  return {.name = absl::StrCat(text.data(), "/64"), .is_loopback = is_loopback};
}

}  // namespace

CallerAddress CallerAddressOf(const sockaddr_storage& caller) {
  if (caller.ss_family == AF_INET) {
    return OfIpv4(reinterpret_cast<const sockaddr_in&>(caller).sin_addr);
  }
  if (caller.ss_family == AF_INET6) {
    return OfIpv6(reinterpret_cast<const sockaddr_in6&>(caller).sin6_addr);
  }
  return {.name = "unknown"};
}

OpenConnections::OpenConnections(int64_t max_total, int64_t max_of_address, bool exempts_loopback)
    : max_total_(max_total), max_of_address_(max_of_address), exempts_loopback_(exempts_loopback) {}

absl::Status OpenConnections::Add(int socket, const CallerAddress& caller) {
  const std::optional<uint64_t> inode = InodeOf(socket);
  if (!inode) return absl::InternalError(absl::StrCat("descriptor ", socket, " is no socket"));
  if (const auto former = connections_.find(socket); former != connections_.end()) {
    Forget(former->second);
    connections_.erase(former);
  }
  absl::Status room = CheckRoom(caller);
  if (!room.ok()) {
    Sweep();
    room = CheckRoom(caller);
  }
  if (!room.ok()) return room;
  connections_[socket] = {*inode, caller.name};
  ++num_by_address_[caller.name];
  return absl::OkStatus();
}

void OpenConnections::End() {
  for (const auto& [number, connection] : connections_) {
    // A descriptor of our own: gRPC may close the other one meanwhile, and another file may get its
    // number.
    const Descriptor socket(fcntl(number, F_DUPFD_CLOEXEC, 0));
    if (InodeOf(socket.get()) == connection.inode) shutdown(socket.get(), SHUT_WR);
  }
}

absl::Status OpenConnections::CheckRoom(const CallerAddress& caller) const {
  if (static_cast<int64_t>(connections_.size()) >= max_total_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("--max_connections=", max_total_, " are open"));
  }
  const auto own = num_by_address_.find(caller.name);
  const bool is_exempt = exempts_loopback_ && caller.is_loopback;
  if (!is_exempt && own != num_by_address_.end() && own->second >= max_of_address_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "--max_connections_per_address=", max_of_address_, " are open of ", caller.name));
  }
  return absl::OkStatus();
}

void OpenConnections::Sweep() {
  const auto start = std::chrono::steady_clock::now();
  if (start < next_sweep_) return;
  std::erase_if(connections_, [this](const auto& entry) {
    if (InodeOf(entry.first) == entry.second.inode) return false;
    Forget(entry.second);
    return true;
  });
  const auto end = std::chrono::steady_clock::now();
  next_sweep_ =
      end + 10 * (end - start);  // a flood of new connections must not cause sweep after sweep
}

void OpenConnections::Forget(const Connection& connection) {
  const auto own = num_by_address_.find(connection.address);
  if (--own->second == 0) num_by_address_.erase(own);
}

}  // namespace isobit
