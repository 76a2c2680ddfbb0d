// See http_server.h.
#include "common/http/http_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/http/http_stream.h"

namespace isobit {
namespace {

// How long the accept loop rests when the system has no descriptor or thread for a connection.
constexpr int kRestMs = 50;

// What may be shown to other sites, stored or guessed: nothing.
httplib::Headers DefaultHeaders() {
  return {{"Cache-Control", "no-store"},
          {"X-Content-Type-Options", "nosniff"},
          {"Referrer-Policy", "no-referrer"},
          {"Cross-Origin-Resource-Policy", "same-origin"},
          {"Content-Security-Policy",
           "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
           "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}};
}

int HttpStatusOf(const absl::Status& status) {
  if (status.code() == absl::StatusCode::kUnauthenticated) return 401;
  if (status.code() == absl::StatusCode::kPermissionDenied) return 403;
  return 500;
}

// OK if the gate lets the request pass.
absl::Status Check(const CallCheck& check, const httplib::Request& request) {
  CallFacts facts;
  facts.method = request.path;
  facts.certificate_names = CertificateNamesOf(request.ssl);
  const size_t num_headers = request.get_header_value_count("Authorization");
  const std::string authorization = request.get_header_value("Authorization");
  if (num_headers == 1) facts.authorization = authorization;
  if (num_headers > 1) facts.authorization = "";  // two of them count as an invalid one
  return check(facts);
}

std::string PatternOf(const std::string& path) { return absl::StrReplaceAll(path, {{".", "\\."}}); }

}  // namespace

class HttpServer::Router : public httplib::Server {
 public:
  // The library ends streams once this is no socket.
  Router() { svr_sock_ = 0; }
  ~Router() override { EndStreams(); }

  void EndStreams() { svr_sock_ = INVALID_SOCKET; }

  void Process(HttpStream& stream) {
    bool closed = false;
    process_request(stream, /*close_connection=*/true, closed,
                    [&](httplib::Request& request) { request.ssl = stream.ssl(); });
  }
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Listen(const Options& options) {
  std::unique_ptr<TlsContext> tls;
  if (!options.tls.certificate.empty()) {
    ISOBIT_ASSIGN_OR_RETURN(tls, TlsContext::Open(options.tls));
  }
  ISOBIT_ASSIGN_OR_RETURN(ListeningSockets listening, ListenOn(options.host, options.port));
  return std::unique_ptr<HttpServer>(new HttpServer(options, std::move(listening), std::move(tls)));
}

HttpServer::HttpServer(const Options& options, ListeningSockets listening,
                       std::unique_ptr<TlsContext> tls)
    : options_(options),
      listening_(std::move(listening)),
      tls_(std::move(tls)),
      router_(std::make_unique<Router>()),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  ISOBIT_CHECK(wake_.is_open()) << "eventfd: errno " << errno;
  router_->set_default_headers(DefaultHeaders());
  router_->set_payload_max_length(HttpStream::kMaxRequestBytes);
  router_->set_error_handler([](const httplib::Request&, httplib::Response& response) {
    if (response.body.empty()) {
      response.set_content(absl::StrCat("HTTP ", response.status, "\n"), "text/plain");
    }
  });
}

HttpServer::~HttpServer() { Stop(); }

void HttpServer::Get(const std::string& path, Handler handler) {
  if (options_.gate == nullptr) return GetOpen(path, std::move(handler));
  GetOpen(path, [check = options_.gate->CheckFor(Listener::kMain), handler = std::move(handler)](
                    const httplib::Request& request, httplib::Response& response) {
    const absl::Status allowed = Check(check, request);
    if (allowed.ok()) return handler(request, response);
    response.status = HttpStatusOf(allowed);
    if (response.status == 401) response.set_header("WWW-Authenticate", "Bearer");
    response.set_content(absl::StrCat(allowed.message(), "\n"), "text/plain");
  });
}

void HttpServer::GetOpen(const std::string& path, Handler handler) {
  router_->Get(PatternOf(path), std::move(handler));
}

void HttpServer::Start() {
  ISOBIT_CHECK(!thread_.joinable()) << "Start called twice";
  thread_ = std::thread([this] { AcceptUntilStopped(); });
}

void HttpServer::BeginStop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  router_->EndStreams();
  ISOBIT_CHECK(eventfd_write(wake_.get(), 1) == 0) << "eventfd: errno " << errno;
}

void HttpServer::Stop() {
  BeginStop();
  if (thread_.joinable()) thread_.join();
  listening_.sockets.clear();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return num_connections_ == 0; });
}

bool HttpServer::Rest(std::chrono::milliseconds duration) {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, duration, [this] { return stopping_; });
}

void HttpServer::AcceptUntilStopped() {
  std::vector<pollfd> events = {{wake_.get(), POLLIN, 0}};
  for (const Descriptor& socket : listening_.sockets) events.push_back({socket.get(), POLLIN, 0});
  while (true) {
    if (poll(events.data(), events.size(), -1) < 0) {
      ISOBIT_CHECK(errno == EINTR || errno == ENOMEM) << "poll: errno " << errno;
      continue;
    }
    if (events[0].revents != 0) return;
    for (size_t i = 1; i < events.size(); ++i) {
      if (events[i].revents != 0) Accept(events[i].fd);
    }
  }
}

void HttpServer::Accept(int listener) {
  Descriptor connection(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!connection.is_open()) {
    const bool is_short = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (is_short) Rest(std::chrono::milliseconds(kRestMs));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (num_connections_ == options_.max_connections) return;
    ++num_connections_;
  }
  try {
    std::thread([this, fd = connection.get()] { Serve(Descriptor(fd)); }).detach();
    connection.Release();
  } catch (const std::system_error&) {  // no thread: the connection is closed
    const std::lock_guard lock(mutex_);
    --num_connections_;
  }
}

void HttpServer::Serve(Descriptor connection) {
  {
    const std::shared_ptr<SSL_CTX> context = tls_ != nullptr ? tls_->Current() : nullptr;
    HttpStream stream(std::move(connection), context.get());
    if (stream.Handshake()) router_->Process(stream);
  }
  // Under the lock: Stop may return, and this object go, once the lock is free.
  const std::lock_guard lock(mutex_);
  --num_connections_;
  changed_.notify_all();
}

}  // namespace isobit
