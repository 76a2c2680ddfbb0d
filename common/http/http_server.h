// A small HTTP server for what people and Prometheus look at: metrics and pages. Requests are
// GET alone, one a connection. TLS, bearer tokens and certificates as at the gRPC port.
//
//   ISOBIT_ASSIGN_OR_RETURN(auto server, HttpServer::Listen(options));
//   server->Get("/metrics", [](const httplib::Request&, httplib::Response& response) { ... });
//   server->Start();
#ifndef ISOBIT_COMMON_HTTP_HTTP_SERVER_H_
#define ISOBIT_COMMON_HTTP_HTTP_SERVER_H_

#include <httplib.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/descriptor.h"
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
    // Each takes a thread while it is open. Further connections are closed at once.
    int max_connections = 32;
  };
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
  void Get(const std::string& path, Handler handler);
  void GetOpen(const std::string& path, Handler handler);

  void Start();

  // Accepts no more, and ends streams at their next write.
  void BeginStop();
  // BeginStop; then waits for the responses under way.
  void Stop();

  // For handlers of streams: waits for `duration`. False, at once: the server stops.
  bool Rest(std::chrono::milliseconds duration);

  int port() const { return listening_.port; }
  bool is_tls() const { return tls_ != nullptr; }

 private:
  // The library's parser, router and writer, with connections of ours.
  class Router;

  HttpServer(const Options& options, ListeningSockets listening, std::unique_ptr<TlsContext> tls);
  void AcceptUntilStopped();
  void Accept(int listener);
  void Serve(Descriptor connection);

  const Options options_;
  ListeningSockets listening_;
  const std::unique_ptr<TlsContext> tls_;  // null: plain text
  const std::unique_ptr<Router> router_;
  const Descriptor wake_;  // an eventfd that ends the accept loop
  std::thread thread_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;    // guarded by mutex_
  int num_connections_ = 0;  // with a thread; guarded by mutex_
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_HTTP_SERVER_H_
