// Connects, sends and receives; no wait is longer than its caller allows.
#include "common/parallel/tcp_connection.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;
using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

constexpr std::chrono::milliseconds kSlice(20);         // of a wait, between two checks
constexpr std::chrono::milliseconds kTryAgain(100);     // while nobody listens
constexpr std::chrono::milliseconds kOneAttempt(5000);  // at one address

// Polls a socket for at most a slice. False: not ready yet.
bool IsReady(int socket, short events) {
  pollfd poll_for{.fd = socket, .events = events, .revents = 0};
  return poll(&poll_for, 1, static_cast<int>(kSlice.count())) > 0;
}

// One attempt at one address. An error says why not; `given_up` is one that ends all attempts.
absl::StatusOr<Descriptor> Attempt(const addrinfo& address, const PeerWait& wait,
                                   const std::string& peer, absl::Status& given_up) {
  Descriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.is_open()) return absl::UnavailableError(strerror(errno));
  const Clock::time_point end = Clock::now() + kOneAttempt;
  int error = connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  while (error == EINPROGRESS) {
    given_up = wait.Check(peer);
    if (!given_up.ok()) return given_up;
    if (Clock::now() > end) return absl::UnavailableError("no answer");
    if (!IsReady(socket.get(), POLLOUT)) continue;
    socklen_t size = sizeof(error);
    if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  }
  if (error != 0) return absl::UnavailableError(strerror(error));
  const int on = 1;
  setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return socket;
}

}  // namespace

absl::Status PeerWait::Check(absl::string_view what) const {
  if (check) ISOBIT_RETURN_IF_ERROR(check());
  if (Clock::now() < deadline) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat(what, ": no answer in time"));
}

absl::StatusOr<TcpConnection> TcpConnection::Connect(const std::string& who,
                                                     const std::string& host, int port,
                                                     const PeerWait& wait) {
  const std::string peer = absl::StrCat(who, " at ", host, ":", port);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int result = getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found);
  if (result != 0) {
    return absl::UnavailableError(absl::StrCat(peer, ": ", gai_strerror(result)));
  }
  const Addresses addresses(found, &freeaddrinfo);
  while (true) {
    absl::Status last = absl::UnavailableError("no address");
    for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
      absl::Status given_up;
      absl::StatusOr<Descriptor> socket = Attempt(*address, wait, peer, given_up);
      if (socket.ok()) return TcpConnection(peer, *std::move(socket));
      ISOBIT_RETURN_IF_ERROR(given_up);
      last = socket.status();
    }
    const Clock::time_point next = Clock::now() + kTryAgain;
    do {
      ISOBIT_RETURN_IF_ERROR(wait.Check(absl::StrCat(peer, ": ", last.message())));
      std::this_thread::sleep_for(kSlice);
    } while (Clock::now() < next);
  }
}

absl::Status TcpConnection::Await(short events, const PeerWait& wait) const {
  do {
    ISOBIT_RETURN_IF_ERROR(wait.Check(peer_));
  } while (!IsReady(socket_.get(), events));
  return absl::OkStatus();
}

absl::Status TcpConnection::Send(absl::string_view bytes, const PeerWait& wait) {
  while (!bytes.empty()) {
    const ssize_t sent = send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN || errno == EINTR) {
      ISOBIT_RETURN_IF_ERROR(Await(POLLOUT, wait));
    } else {
      return absl::UnavailableError(absl::StrCat(peer_, ": ", strerror(errno)));
    }
  }
  return absl::OkStatus();
}

absl::Status TcpConnection::Receive(void* out, size_t bytes, const PeerWait& wait) {
  auto* to = static_cast<char*>(out);
  for (size_t left = bytes; left > 0;) {
    // Also while bytes keep coming: a sender must not hold back a caller that wants no more.
    ISOBIT_RETURN_IF_ERROR(wait.Check(peer_));
    const ssize_t received = recv(socket_.get(), to, left, 0);
    if (received > 0) {
      to += received;
      left -= static_cast<size_t>(received);
    } else if (received == 0) {
      return absl::UnavailableError(absl::StrCat(peer_, " has closed the connection, ", left,
                                                 " bytes before the end of what it sends"));
    } else if (errno == EAGAIN || errno == EINTR) {
      ISOBIT_RETURN_IF_ERROR(Await(POLLIN, wait));
    } else {
      return absl::UnavailableError(absl::StrCat(peer_, ": ", strerror(errno)));
    }
  }
  return absl::OkStatus();
}

}  // namespace isobit
