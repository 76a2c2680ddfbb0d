// A small HTTP server for people and Prometheus: metrics and pages. It accepts only GET, one
// request per connection, and reads only its path, Host and Authorization. Answers have no ranges
// and are not compressed. TLS, bearer tokens and certificates work as at the gRPC port.
//
// One thread reads the requests of all connections. A complete request gets a thread for its
// answer, so callers who send only half of one occupy nothing that others need.
//
//   ISOBIT_ASSIGN_OR_RETURN(auto server, HttpServer::Listen(options));
//   server->Get("/metrics", [](const httplib::Request&, httplib::Response& response) { ... });
//   server->Start();
#ifndef ISOBIT_COMMON_HTTP_HTTP_SERVER_H_
#define ISOBIT_COMMON_HTTP_HTTP_SERVER_H_

#include <httplib.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "common/access/call_gate.h"
#include "common/base/descriptor.h"
#include "common/http/http_stream.h"
#include "common/http/request_head.h"
#include "common/http/tls_context.h"
#include "common/rpc/listening_socket.h"
#include "common/rpc/tls_files.h"

namespace isobit {

class HttpServer {
 public:
  struct Options {
    // See ListenOn.
    std::string host = "127.0.0.1";
    int port = 0;
    // Plain text if there is no certificate.
    TlsFiles tls{};
    // Checks requests as methods of the main listener; null: every caller may read.
    std::shared_ptr<CallGate> gate = nullptr;
    // Names by which the server may be called (HostNames), in addition to `host`.
    std::vector<std::string> host_names{};
    // Answers at the same time, each with a thread; further requests get 503.
    int max_pages = 16;
    int max_streams = 128;
  };
  // Each kind of answer has its own limit.
  enum class Kind {
    kPage,    // must be sent within kPageTimeout
    kStream,  // continues as long as its reader reads
    kHealth,  // a few bytes for probes; any Host is accepted
  };
  static constexpr std::chrono::seconds kPageTimeout{10};
  // The time in which a request must be complete.
  static constexpr std::chrono::seconds kRequestTimeout{5};
  // Connections without a complete request. One more closes the oldest one of the address that has
  // the most of them.
  static constexpr size_t kMaxWaiting = 256;

  // Called on any thread, by several at once. A status other than 200 must be set.
  using Handler = std::function<void(const httplib::Request&, httplib::Response&)>;

  // Binds and listens. Errors: those of ListenOn and TlsContext::Open.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Listen(const Options& options);

  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;
  // Calls Stop.
  ~HttpServer();

  // Call before Start. Get: for callers with a role that method_roles.h lists for `path`; others
  // get 401 or 403. GetOpen: for every caller who can connect.
  void Get(const std::string& path, Handler handler, Kind kind = Kind::kPage);
  void GetOpen(const std::string& path, Handler handler, Kind kind = Kind::kPage);

  void Start();

  // Accepts no more, drops incomplete requests, and ends streams at their next write.
  void BeginStop();
  // Calls BeginStop, then waits for running answers, at most HttpStream::kStopTimeout.
  void Stop();

  // For handlers of streams: waits for `duration`. Returns false at once if the server stops.
  bool Rest(std::chrono::milliseconds duration);

  int port() const { return listening_.port; }
  bool is_tls() const { return tls_ != nullptr; }

 private:
  // The library's parser, router and writer, on our own connections.
  class Router;
  // A connection whose request is not complete.
  struct Waiting {
    std::unique_ptr<HttpStream> stream;
    std::string address;
    std::chrono::steady_clock::time_point deadline;
  };
  static constexpr size_t kNumKinds = 3;

  HttpServer(const Options& options, ListeningSockets listening, std::unique_ptr<TlsContext> tls);
  // The thread's loop, and its steps.
  void ReadUntilStopped();
  void Accept(int listener);
  void MakeRoom();
  void Advance(Waiting& waiting);
  void Answer(std::unique_ptr<HttpStream> stream);
  // Answers `stream`, which counts as an answer of `kind` already, in a thread of its own.
  void Serve(std::unique_ptr<HttpStream> stream, Kind kind);
  bool TakePlace(Kind kind);
  void LeavePlace(Kind kind);

  const Options options_;
  const HostNames host_names_;
  ListeningSockets listening_;
  const std::unique_ptr<TlsContext> tls_;  // null: plain text
  const std::unique_ptr<Router> router_;
  std::map<std::string, Kind, std::less<>> kinds_;  // of paths; others are pages
  const Descriptor wake_;                           // an eventfd, readable once the server stops
  std::thread thread_;
  std::vector<Waiting> waiting_;  // in order of arrival; used by thread_ alone

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;                        // guarded by mutex_
  std::array<int, kNumKinds> num_answers_ = {};  // that have a thread; guarded by mutex_
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_HTTP_SERVER_H_
