// Sockets and OpenSSL under one interface, with a time limit on every wait.
#include "common/http/http_stream.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/http/request_head.h"

namespace isobit {
namespace {

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

HttpStream::HttpStream(Descriptor connection, SSL_CTX* context, int stop)
    : connection_(std::move(connection)),
      ssl_(context == nullptr ? nullptr : SSL_new(context), &SSL_free),
      stop_(stop),
      wanted_events_(POLLIN),
      is_shaken_(context == nullptr) {
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
HttpStream::Progress HttpStream::Try(const Transfer& transfer, short events, ssize_t& done) {
  while (!failed_) {
    done = transfer();
    if (done > 0) return Progress::kDone;
    wanted_events_ = events;
    if (ssl_ == nullptr) {
      if (done < 0 && errno == EINTR) continue;
      failed_ = done == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
    } else {
      const int error = SSL_get_error(ssl_.get(), static_cast<int>(done));
      ERR_clear_error();
      // In a handshake, either direction may be waited for.
      failed_ = error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE;
      wanted_events_ = error == SSL_ERROR_WANT_WRITE ? POLLOUT : POLLIN;
    }
    if (!failed_) return Progress::kWaits;
  }
  return Progress::kFailed;
}

HttpStream::Progress HttpStream::Advance() {
  ssize_t done = 0;
  if (!is_shaken_) {
    const Progress progress =
        Try([this]() -> ssize_t { return SSL_accept(ssl_.get()); }, POLLIN, done);
    if (progress != Progress::kDone) return progress;
    is_shaken_ = true;
  }
  std::array<char, 4096> buffer;
  while (true) {
    const size_t room = std::min(buffer.size(), kMaxRequestBytes - received_.size());
    if (room == 0) return Progress::kFailed;
    const Progress progress = Try(
        [&]() -> ssize_t {
          return ssl_ == nullptr ? recv(connection_.get(), buffer.data(), room, 0)
                                 : SSL_read(ssl_.get(), buffer.data(), static_cast<int>(room));
        },
        POLLIN, done);
    if (progress != Progress::kDone) return progress;
    received_.append(buffer.data(), static_cast<size_t>(done));
    head_size_ = HeadSize(received_);
    if (head_size_ > 0) return Progress::kDone;
  }
}

void HttpStream::SendAtOnce(absl::string_view answer) {
  ssize_t done = 0;
  Try(
      [&]() -> ssize_t {
        return ssl_ == nullptr
                   ? send(connection_.get(), answer.data(), answer.size(), MSG_NOSIGNAL)
                   : SSL_write(ssl_.get(), answer.data(), static_cast<int>(answer.size()));
      },
      POLLOUT, done);
  if (ssl_ != nullptr) return;
  // What came behind the head would make the kernel throw away the answer with the connection.
  shutdown(connection_.get(), SHUT_WR);
  std::array<char, 4096> rest;
  for (int i = 0; i < 16 && recv(connection_.get(), rest.data(), rest.size(), 0) > 0; ++i) {
  }
}

void HttpStream::Pass(std::string head, std::chrono::seconds answer_limit) {
  received_ = std::move(head);
  num_taken_ = 0;
  if (answer_limit != std::chrono::seconds::max()) answer_deadline_ = Clock::now() + answer_limit;
}

bool HttpStream::WaitUntilWritable() {
  auto deadline = std::min(Clock::now() + kWriteTimeout, answer_deadline_);
  std::array<pollfd, 2> events = {{{connection_.get(), wanted_events_, 0}, {stop_, POLLIN, 0}}};
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return false;
    const int num_ready = poll(events.data(), events.size(), static_cast<int>(left.count()));
    if (num_ready < 0 && errno != EINTR) return false;
    if (num_ready > 0 && events[0].revents != 0) return true;
    if (num_ready > 0) {  // the server stops
      answer_deadline_ = std::min(answer_deadline_, Clock::now() + kStopTimeout);
      deadline = std::min(deadline, answer_deadline_);
      events[1].fd = -1;
    }
  }
}

ssize_t HttpStream::read(char* data, size_t size) {
  const size_t taken = std::min(size, received_.size() - num_taken_);
  std::memcpy(data, received_.data() + num_taken_, taken);
  num_taken_ += taken;
  return static_cast<ssize_t>(taken);
}

ssize_t HttpStream::write(const char* data, size_t size) {
  absl::string_view rest(data, size);
  while (!rest.empty()) {
    ssize_t done = 0;
    // A TLS record at a time, so that each has its own time limit.
    const size_t part = std::min<size_t>(rest.size(), 16 << 10);
    const Progress progress = Try(
        [&]() -> ssize_t {
          return ssl_ == nullptr ? send(connection_.get(), rest.data(), part, MSG_NOSIGNAL)
                                 : SSL_write(ssl_.get(), rest.data(), static_cast<int>(part));
        },
        POLLOUT, done);
    if (progress == Progress::kDone) {
      rest.remove_prefix(static_cast<size_t>(done));
    } else if (progress == Progress::kFailed || !WaitUntilWritable()) {
      failed_ = true;
      return -1;
    }
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
