// The other side of a TCP connection, in a test: it listens on loopback and does what the test
// wants, good or bad. And the sender of a group of TCP connections
// (common/parallel/tcp_broadcast.h).
#ifndef ISOBIT_TESTS_SUPPORT_LOOPBACK_PEER_H_
#define ISOBIT_TESTS_SUPPORT_LOOPBACK_PEER_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/check.h"
#include "common/base/descriptor.h"

namespace isobit::testing_support {

// Both block. False: the other side has gone.
inline bool SendAll(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}
inline bool ReceiveAll(int fd, size_t bytes, std::string& out) {
  out.resize(bytes);
  return bytes == 0 || recv(fd, out.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
}

// A number's bytes.
template <typename T>
std::string Raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

class LoopbackListener {
 public:
  LoopbackListener() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    ISOBIT_CHECK(bind(socket_.get(), any, size) == 0 && listen(socket_.get(), 16) == 0 &&
                 getsockname(socket_.get(), any, &size) == 0)
        << "a port of loopback";
    port_ = ntohs(address.sin_port);
  }
  int port() const { return port_; }
  Descriptor Accept() { return Descriptor(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC)); }

 private:
  Descriptor socket_;
  int port_ = 0;
};

// Rank 0 of a group of TCP connections.
class TcpSender {
 public:
  std::string id() const {
    std::string id = absl::StrCat("isobit-tcp 127.0.0.1:", listener_.port());
    id.resize(128, '\0');
    return id;
  }

  // Waits for the other ranks, and tells them that all are there. False: one said something wrong.
  bool Join(uint32_t size = 2) {
    while (ranks_.size() + 1 < size) {
      ranks_.push_back(listener_.Accept());
      std::string hello;
      if (!ReceiveAll(ranks_.back().get(), 128 + 8, hello)) return false;
      if (hello.substr(0, 128) != id() || hello.substr(132) != Raw(size)) return false;
    }
    for (const Descriptor& rank : ranks_) SendAll(rank.get(), "\1");
    return true;
  }

  // False: a rank has gone.
  bool Broadcast(absl::string_view bytes) { return Say(Raw<uint64_t>(bytes.size())) && Say(bytes); }
  // Anything else.
  bool Say(absl::string_view bytes) {
    for (const Descriptor& rank : ranks_) {
      if (!SendAll(rank.get(), bytes)) return false;
    }
    return true;
  }
  // Waits until the ranks have gone.
  void AwaitEnd() {
    char byte = 0;
    for (const Descriptor& rank : ranks_) {
      while (recv(rank.get(), &byte, 1, 0) > 0) {
      }
    }
  }
  void Leave() { ranks_.clear(); }

 private:
  LoopbackListener listener_;
  std::vector<Descriptor> ranks_;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_LOOPBACK_PEER_H_
