// See http_stream.h.
#include "common/http/http_stream.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/string_view.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;

// Whether `socket` is ready for `events` before `deadline`.
bool WaitFor(int socket, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return false;
    pollfd event = {socket, events, 0};
    const int num_ready = poll(&event, 1, static_cast<int>(left.count()));
    if (num_ready > 0) return true;
    if (num_ready < 0 && errno != EINTR) return false;
  }
}

void AddressOf(const sockaddr_storage& address, std::string& ip, int& port) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &v6.sin6_addr, text.data(), text.size());
    port = ntohs(v6.sin6_port);
  } else {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &v4.sin_addr, text.data(), text.size());
    port = ntohs(v4.sin_port);
  }
  ip = text.data();
}

}  // namespace

HttpStream::HttpStream(Descriptor connection, SSL_CTX* context)
    : connection_(std::move(connection)),
      ssl_(context == nullptr ? nullptr : SSL_new(context), &SSL_free) {
  if (context != nullptr && (ssl_ == nullptr || SSL_set_fd(ssl_.get(), connection_.get()) != 1)) {
    failed_ = true;
  }
}

HttpStream::~HttpStream() {
  // After a failure OpenSSL must not be asked to shut down.
  if (ssl_ != nullptr && !failed_) SSL_shutdown(ssl_.get());
  ERR_clear_error();
}

template <typename Transfer>
ssize_t HttpStream::Repeat(const Transfer& transfer, short events, Clock::time_point deadline) {
  while (!failed_) {
    const ssize_t done = transfer();
    if (done > 0) return done;
    if (ssl_ == nullptr) {
      if (done == 0) return 0;
      if (errno == EINTR) continue;
      failed_ = errno != EAGAIN && errno != EWOULDBLOCK;
    } else {
      const int error = SSL_get_error(ssl_.get(), static_cast<int>(done));
      ERR_clear_error();
      if (error == SSL_ERROR_ZERO_RETURN) return 0;
      // In a handshake, either direction may be waited for.
      failed_ = error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE;
      events = error == SSL_ERROR_WANT_WRITE ? POLLOUT : POLLIN;
    }
    if (!failed_) failed_ = !WaitFor(connection_.get(), events, deadline);
  }
  return -1;
}

bool HttpStream::Handshake() {
  if (ssl_ == nullptr) return true;
  return Repeat([this]() -> ssize_t { return SSL_accept(ssl_.get()); }, POLLIN, deadline_) > 0;
}

ssize_t HttpStream::ReadSome(char* data, size_t size) {
  return Repeat(
      [&]() -> ssize_t {
        return ssl_ == nullptr ? recv(connection_.get(), data, size, 0)
                               : SSL_read(ssl_.get(), data, static_cast<int>(size));
      },
      POLLIN, deadline_);
}

ssize_t HttpStream::WriteSome(const char* data, size_t size) {
  return Repeat(
      [&]() -> ssize_t {
        return ssl_ == nullptr ? send(connection_.get(), data, size, MSG_NOSIGNAL)
                               : SSL_write(ssl_.get(), data, static_cast<int>(size));
      },
      POLLOUT, Clock::now() + kWriteTimeout);
}

bool HttpStream::is_readable() const { return !failed_; }

bool HttpStream::is_writable() const { return !failed_; }

ssize_t HttpStream::read(char* data, size_t size) {
  if (begin_ == end_) {
    const size_t room = std::min(buffer_.size(), kMaxRequestBytes - num_read_);
    if (room == 0) return -1;
    const ssize_t got = ReadSome(buffer_.data(), room);
    if (got <= 0) return got;
    begin_ = 0;
    end_ = static_cast<size_t>(got);
    num_read_ += end_;
  }
  const size_t taken = std::min(size, end_ - begin_);
  std::memcpy(data, buffer_.data() + begin_, taken);
  begin_ += taken;
  return static_cast<ssize_t>(taken);
}

ssize_t HttpStream::write(const char* data, size_t size) {
  absl::string_view rest(data, size);
  while (!rest.empty()) {
    // A TLS record at a time, so that each has its own time limit.
    const ssize_t sent = WriteSome(rest.data(), std::min<size_t>(rest.size(), 16 << 10));
    if (sent <= 0) return -1;
    rest.remove_prefix(static_cast<size_t>(sent));
  }
  return static_cast<ssize_t>(size);
}

void HttpStream::get_remote_ip_and_port(std::string& ip, int& port) const {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getpeername(connection_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0) {
    AddressOf(address, ip, port);
  }
}

void HttpStream::get_local_ip_and_port(std::string& ip, int& port) const {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getsockname(connection_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0) {
    AddressOf(address, ip, port);
  }
}

}  // namespace isobit
