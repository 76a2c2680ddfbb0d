// A small HTTP server for what people and Prometheus look at: metrics and pages. Requests are
// GET alone, one a connection, of which only the path, Host and Authorization are read: an answer
// has no ranges and is not compressed. TLS, bearer tokens and certificates as at the gRPC port.
//
// One thread reads the requests of all connections. An answer gets a thread once its request is
// whole, so callers who send half of one hold nothing that others need.
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
#include "common/base/descriptor.h"
#include "common/http/http_stream.h"
#include "common/http/request_head.h"
#include "common/http/tls_context.h"
#include "common/rpc/call_gate.h"
#include "common/rpc/listening_socket.h"
#include "common/rpc/tls_files.h"

namespace isobit {

class HttpServer {
 public:
  struct Options {
    // As ListenOn.
    std::string host = "127.0.0.1";
    int port = 0;
    // Without a certificate: plain text.
    TlsFiles tls{};
    // Checks requests, as methods of the main listener; null: everybody may look.
    std::shared_ptr<CallGate> gate = nullptr;
    // Names by which the server may be called (HostNames), beside `host`.
    std::vector<std::string> host_names{};
    // Answers under way at one time, each with a thread; others get 503.
    int max_pages = 16;
    int max_streams = 128;
  };
  // Places for answers of one kind are not taken by another.
  enum class Kind {
    kPage,    // all of it within kPageTimeout
    kStream,  // goes on as long as its reader reads
    kHealth,  // a few bytes for probes, whatever Host they send
  };
  static constexpr std::chrono::seconds kPageTimeout{10};
  // Until a request must be whole.
  static constexpr std::chrono::seconds kRequestTimeout{5};
  // Connections without a whole request. One more ends the oldest one of the address that has
  // most of them.
  static constexpr size_t kMaxWaiting = 256;

  // Any thread, several at one time. A status other than 200 must be set.
  using Handler = std::function<void(const httplib::Request&, httplib::Response&)>;

  // Binds and listens. Errors: as ListenOn and TlsContext::Open.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Listen(const Options& options);

  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;
  // Calls Stop.
  ~HttpServer();

  // Before Start. Get: for those with a role that method_roles.h names for `path`; others get 401
  // or 403. GetOpen: for everybody who can connect.
  void Get(const std::string& path, Handler handler, Kind kind = Kind::kPage);
  void GetOpen(const std::string& path, Handler handler, Kind kind = Kind::kPage);

  void Start();

  // Accepts no more, drops requests that are not whole, and ends streams at their next write.
  void BeginStop();
  // BeginStop; then waits for the answers under way, at most HttpStream::kStopTimeout.
  void Stop();

  // For handlers of streams: waits for `duration`. False, at once: the server stops.
  bool Rest(std::chrono::milliseconds duration);

  int port() const { return listening_.port; }
  bool is_tls() const { return tls_ != nullptr; }

 private:
  // The library's parser, router and writer, with connections of ours.
  class Router;
  // A connection whose request is not whole.
  struct Waiting {
    std::unique_ptr<HttpStream> stream;
    std::string address;
    std::chrono::steady_clock::time_point deadline;
  };
  static constexpr size_t kNumKinds = 3;

  HttpServer(const Options& options, ListeningSockets listening, std::unique_ptr<TlsContext> tls);
  // What the thread does, and its steps.
  void ReadUntilStopped();
  void Accept(int listener);
  void MakeRoom();
  void Advance(Waiting& waiting);
  void Answer(std::unique_ptr<HttpStream> stream);
  // Serves `stream`, for which a place is taken, in a thread of its own.
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
  std::vector<Waiting> waiting_;  // in the order of their coming; of thread_ alone

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;                        // guarded by mutex_
  std::array<int, kNumKinds> num_answers_ = {};  // with a thread; guarded by mutex_
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_HTTP_SERVER_H_
