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

// Advance reads the head of the request, of at most kMaxRequestBytes, as far as it has come: one
// thread can watch many connections, and none of them can hold it up. Then the library, in a
// thread of its own, reads what Pass gave it, and writes. For one thread at a time.
class HttpStream final : public httplib::Stream {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr size_t kMaxRequestBytes = 16 << 10;
  // A write may make no progress for so long; once the server stops, so long in all.
  static constexpr std::chrono::seconds kWriteTimeout{10};
  static constexpr std::chrono::seconds kStopTimeout{1};

  enum class Progress {
    kWaits,   // for the socket, as wanted_events() says
    kDone,    // head() is whole
    kFailed,  // the connection is of no use any more
  };

  // connection: an accepted, non-blocking socket. context: null for plain text. stop: a
  // descriptor that is readable once the server stops.
  HttpStream(Descriptor connection, SSL_CTX* context, int stop);
  // Says goodbye to TLS.
  ~HttpStream() override;

  // Goes on with TLS's handshake, then with the head.
  Progress Advance();
  short wanted_events() const { return wanted_events_; }
  absl::string_view head() const { return absl::string_view(received_).substr(0, head_size_); }

  // Sends a short answer as far as it goes at once.
  void SendAtOnce(absl::string_view answer);

  // `head` is all that read() gives from now on. answer_limit: how long all writes together may
  // take; max(): as long as each makes progress.
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
  // One try of `transfer`, which returns what SSL_read or recv would. kWaits: the socket was not
  // ready; wanted_events_ is set.
  template <typename Transfer>
  Progress Try(const Transfer& transfer, short events, ssize_t& done);
  // False: it failed, or the time is over.
  bool WaitUntilWritable();

  const Descriptor connection_;
  const std::unique_ptr<SSL, decltype(&SSL_free)> ssl_;
  const int stop_;
  short wanted_events_;
  bool is_shaken_;       // TLS's handshake is done, or there is none
  bool failed_ = false;  // the connection is of no use any more
  std::string received_;
  size_t head_size_ = 0;
  size_t num_taken_ = 0;  // of received_, by read()
  Clock::time_point answer_deadline_ = Clock::time_point::max();
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_HTTP_STREAM_H_
