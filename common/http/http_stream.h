// One HTTP connection, in plain text or TLS: first its request, read without waiting, then its
// answer.
#ifndef ISOBIT_COMMON_HTTP_HTTP_STREAM_H_
#define ISOBIT_COMMON_HTTP_HTTP_STREAM_H_

#include <httplib.h>
#include <openssl/ssl.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "common/base/descriptor.h"

namespace isobit {

// Advance reads as much of the request's head as has come, at most kMaxRequestBytes. So one thread
// can watch many connections, and none of them can block it. Then the library, in a thread of its
// own, reads what Pass gave it, and writes. Used by one thread at a time.
class HttpStream final : public httplib::Stream {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr size_t kMaxRequestBytes = 16 << 10;
  // How long a write may make no progress; and how long all writes may take once the server stops.
  static constexpr std::chrono::seconds kWriteTimeout{10};
  static constexpr std::chrono::seconds kStopTimeout{1};

  enum class Progress {
    kWaits,   // for the socket, as wanted_events() says
    kDone,    // head() is complete
    kFailed,  // the connection cannot be used any more
  };

  // connection: an accepted, non-blocking socket. context: null for plain text. stop: a
  // descriptor that is readable once the server stops.
  HttpStream(Descriptor connection, SSL_CTX* context, int stop);
  // Closes TLS.
  ~HttpStream() override;

  // Continues the TLS handshake, then reads the head.
  Progress Advance();
  short wanted_events() const { return wanted_events_; }
  absl::string_view head() const { return absl::string_view(received_).substr(0, head_size_); }

  // Sends as much of a short answer as can be sent without waiting.
  void SendAtOnce(absl::string_view answer);

  // From now on read() returns `head` and nothing else. answer_limit: how long all writes together
  // may take; max(): no limit while each makes progress.
  void Pass(std::string head, std::chrono::seconds answer_limit);

  // Null in plain text.
  const SSL* ssl() const { return ssl_.get(); }

  bool is_readable() const override { return !failed_; }
  bool is_writable() const override { return !failed_; }
  ssize_t read(char* data, size_t size) override;
  ssize_t write(const char* data, size_t size) override;
  void get_remote_ip_and_port(std::string& ip, int& port) const override;
  void get_local_ip_and_port(std::string& ip, int& port) const override;
  socket_t socket() const override { return connection_.get(); }

 private:
  // Tries `transfer` once, which returns what SSL_read or recv would. kWaits: the socket was not
  // ready, and wanted_events_ is set.
  template <typename Transfer>
  Progress Try(const Transfer& transfer, short events, ssize_t& done);
  // False: it failed, or time is up.
  bool WaitUntilWritable();

  const Descriptor connection_;
  const std::unique_ptr<SSL, decltype(&SSL_free)> ssl_;
  const int stop_;
  short wanted_events_;
  bool is_shaken_;       // the TLS handshake is done, or there is none
  bool failed_ = false;  // the connection cannot be used any more
  std::string received_;
  size_t head_size_ = 0;
  size_t num_taken_ = 0;  // bytes of received_ that read() has returned
  Clock::time_point answer_deadline_ = Clock::time_point::max();
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_HTTP_STREAM_H_
