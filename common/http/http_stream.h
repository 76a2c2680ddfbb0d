// One HTTP connection, in plain text or TLS, with bounds that the HTTP library lacks.
#ifndef ISOBIT_COMMON_HTTP_HTTP_STREAM_H_
#define ISOBIT_COMMON_HTTP_HTTP_STREAM_H_

#include <httplib.h>
#include <openssl/ssl.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "common/base/descriptor.h"

namespace isobit {

// Reads at most kMaxRequestBytes, all within kRequestTimeout of the start: a client can neither
// fill the memory with headers nor hold its thread by sending a byte now and then. A write that
// makes no progress for kWriteTimeout fails. For one thread.
class HttpStream final : public httplib::Stream {
 public:
  static constexpr size_t kMaxRequestBytes = 16 << 10;
  static constexpr std::chrono::seconds kRequestTimeout{10};
  static constexpr std::chrono::seconds kWriteTimeout{10};

  // connection: an accepted, non-blocking socket. context: null for plain text.
  HttpStream(Descriptor connection, SSL_CTX* context);
  // Says goodbye to TLS.
  ~HttpStream() override;

  // TLS's handshake, within kRequestTimeout; at once true in plain text.
  bool Handshake();

  // Null in plain text.
  const SSL* ssl() const { return ssl_.get(); }

  bool is_readable() const override;
  bool is_writable() const override;
  ssize_t read(char* data, size_t size) override;
  ssize_t write(const char* data, size_t size) override;
  void get_remote_ip_and_port(std::string& ip, int& port) const override;
  void get_local_ip_and_port(std::string& ip, int& port) const override;
  socket_t socket() const override { return connection_.get(); }

 private:
  using Clock = std::chrono::steady_clock;

  // The result of one try of `transfer`, which returns what SSL_read or recv would, repeated while
  // the socket is not ready; -1 from `deadline` on.
  template <typename Transfer>
  ssize_t Repeat(const Transfer& transfer, short events, Clock::time_point deadline);
  ssize_t ReadSome(char* data, size_t size);
  ssize_t WriteSome(const char* data, size_t size);

  const Descriptor connection_;
  const Clock::time_point deadline_ = Clock::now() + kRequestTimeout;  // of the request
  const std::unique_ptr<SSL, decltype(&SSL_free)> ssl_;
  bool failed_ = false;  // the connection is of no use any more

  // The library reads a byte at a time.
  std::array<char, 4096> buffer_;
  size_t begin_ = 0, end_ = 0;  // of what is read and not taken
  size_t num_read_ = 0;         // from the connection
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_HTTP_STREAM_H_
