// Reads requests, and hands each whole one to the HTTP library in a thread of its own.
#include "common/http/http_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

// How long the accept loop rests when the system has no descriptor or thread for a connection.
constexpr int kRestMs = 50;
// Their answers fit into a socket's buffer: each ends at once.
constexpr int kMaxHealthAnswers = 16;

using Clock = std::chrono::steady_clock;

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

// A whole answer without the library, for a request that gets no thread.
std::string Refusal(absl::string_view status, absl::string_view headers, absl::string_view text) {
  return absl::StrCat("HTTP/1.1 ", status, "\r\n", headers, "Content-Type: text/plain\r\n",
                      "Content-Length: ", text.size() + 1, "\r\nConnection: close\r\n\r\n", text,
                      "\n");
}

std::string RefusalOf(const absl::Status& bad_head) {
  switch (bad_head.code()) {
    case absl::StatusCode::kUnimplemented:
      return Refusal("405 Method Not Allowed", "Allow: GET, HEAD\r\n", bad_head.message());
    case absl::StatusCode::kNotFound:
      return Refusal("404 Not Found", "", bad_head.message());
    default:
      return Refusal("400 Bad Request", "", bad_head.message());
  }
}

HostNames NamesOf(const HttpServer::Options& options) {
  std::vector<std::string> names = options.host_names;
  names.push_back(options.host);
  return HostNames(names);
}

// Has the response, if it is a stream, end once the gate lets the request pass no more: its client
// may leave the access file meanwhile.
void KeepChecking(const CallCheck& check, const httplib::Request& request,
                  httplib::Response& response) {
  if (response.content_provider_ == nullptr) return;
  response.content_provider_ = [check, &request, provider = std::move(response.content_provider_)](
                                   size_t offset, size_t length, httplib::DataSink& sink) {
    return Check(check, request).ok() && provider(offset, length, sink);
  };
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
      host_names_(NamesOf(options)),
      listening_(std::move(listening)),
      tls_(std::move(tls)),
      router_(std::make_unique<Router>()),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  ISOBIT_CHECK(wake_.is_open()) << "eventfd: errno " << errno;
  router_->set_default_headers(DefaultHeaders());
  router_->set_error_handler([](const httplib::Request&, httplib::Response& response) {
    if (response.body.empty()) {
      response.set_content(absl::StrCat("HTTP ", response.status, "\n"), "text/plain");
    }
  });
}

HttpServer::~HttpServer() { Stop(); }

void HttpServer::Get(const std::string& path, Handler handler, Kind kind) {
  if (options_.gate == nullptr) return GetOpen(path, std::move(handler), kind);
  GetOpen(
      path,
      [check = options_.gate->CheckFor(Listener::kMain), handler = std::move(handler)](
          const httplib::Request& request, httplib::Response& response) {
        const absl::Status allowed = Check(check, request);
        if (allowed.ok()) {
          handler(request, response);
          return KeepChecking(check, request, response);
        }
        response.status = HttpStatusOf(allowed);
        if (response.status == 401) response.set_header("WWW-Authenticate", "Bearer");
        response.set_content(absl::StrCat(allowed.message(), "\n"), "text/plain");
      },
      kind);
}

void HttpServer::GetOpen(const std::string& path, Handler handler, Kind kind) {
  kinds_[path] = kind;
  router_->Get(PatternOf(path), std::move(handler));
}

void HttpServer::Start() {
  ISOBIT_CHECK(!thread_.joinable()) << "Start called twice";
  thread_ = std::thread([this] { ReadUntilStopped(); });
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
  changed_.wait(lock, [this] { return num_answers_ == std::array<int, kNumKinds>{}; });
}

bool HttpServer::Rest(std::chrono::milliseconds duration) {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, duration, [this] { return stopping_; });
}

void HttpServer::ReadUntilStopped() {
  const size_t num_listeners = listening_.sockets.size();
  std::vector<pollfd> events;
  while (true) {
    events = {{wake_.get(), POLLIN, 0}};
    for (const Descriptor& socket : listening_.sockets) events.push_back({socket.get(), POLLIN, 0});
    auto left = std::chrono::milliseconds(-1);  // no limit
    for (const Waiting& waiting : waiting_) {
      events.push_back({waiting.stream->socket(), waiting.stream->wanted_events(), 0});
    }
    // All have the same time, so the first one's is over first.
    if (!waiting_.empty()) {
      left = std::max(std::chrono::milliseconds(0), std::chrono::ceil<std::chrono::milliseconds>(
                                                        waiting_.front().deadline - Clock::now()));
    }
    if (poll(events.data(), events.size(), static_cast<int>(left.count())) < 0) {
      ISOBIT_CHECK(errno == EINTR || errno == ENOMEM) << "poll: errno " << errno;
      continue;
    }
    if (events[0].revents != 0) break;
    const auto now = Clock::now();
    for (size_t i = 0; i < waiting_.size(); ++i) {
      if (events[1 + num_listeners + i].revents != 0) Advance(waiting_[i]);
      if (now >= waiting_[i].deadline) waiting_[i].stream = nullptr;
    }
    std::erase_if(waiting_, [](const Waiting& waiting) { return waiting.stream == nullptr; });
    for (size_t i = 1; i <= num_listeners; ++i) {
      if (events[i].revents != 0) Accept(events[i].fd);
    }
  }
  waiting_.clear();
}

void HttpServer::Accept(int listener) {
  Descriptor connection(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!connection.is_open()) {
    const bool is_short = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (is_short && !waiting_.empty()) MakeRoom();
    if (is_short) Rest(std::chrono::milliseconds(kRestMs));
    return;
  }
  if (waiting_.size() == kMaxWaiting) MakeRoom();
  const std::shared_ptr<SSL_CTX> context = tls_ != nullptr ? tls_->Current() : nullptr;
  Waiting waiting = {
      .stream = std::make_unique<HttpStream>(std::move(connection), context.get(), wake_.get()),
      .address = "",
      .deadline = Clock::now() + kRequestTimeout};
  int port = 0;
  waiting.stream->get_remote_ip_and_port(waiting.address, port);
  Advance(waiting);
  if (waiting.stream != nullptr) waiting_.push_back(std::move(waiting));
}

void HttpServer::MakeRoom() {
  std::map<std::string, int> counts;
  for (const Waiting& waiting : waiting_) ++counts[waiting.address];
  const auto most =
      std::max_element(counts.begin(), counts.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  waiting_.erase(std::find_if(waiting_.begin(), waiting_.end(), [&](const Waiting& waiting) {
    return waiting.address == most->first;
  }));
}

void HttpServer::Advance(Waiting& waiting) {
  switch (waiting.stream->Advance()) {
    case HttpStream::Progress::kWaits:
      return;
    case HttpStream::Progress::kFailed:
      waiting.stream = nullptr;
      return;
    case HttpStream::Progress::kDone:
      return Answer(std::move(waiting.stream));
  }
}

void HttpServer::Answer(std::unique_ptr<HttpStream> stream) {
  absl::StatusOr<RequestHead> head = ParseRequestHead(stream->head());
  if (!head.ok()) return stream->SendAtOnce(RefusalOf(head.status()));
  const auto found = kinds_.find(head->path);
  const Kind kind = found != kinds_.end() ? found->second : Kind::kPage;
  if (kind != Kind::kHealth && !head->host.empty() && !host_names_.Allow(head->host)) {
    return stream->SendAtOnce(Refusal("421 Misdirected Request", "",
                                      "this name of the server is not known: expected localhost, "
                                      "an address, or a name of --http_hosts"));
  }
  if (!TakePlace(kind)) {
    return stream->SendAtOnce(Refusal("503 Service Unavailable", "Retry-After: 1\r\n",
                                      "too many answers are under way: expected fewer readers"));
  }
  const bool is_stream = kind == Kind::kStream;
  stream->Pass(std::move(head->text), is_stream ? std::chrono::seconds::max() : kPageTimeout);
  Serve(std::move(stream), kind);
}

void HttpServer::Serve(std::unique_ptr<HttpStream> stream, Kind kind) {
  try {
    std::thread([this, kind, stream = std::move(stream)]() mutable {
      router_->Process(*stream);
      stream = nullptr;
      LeavePlace(kind);
    }).detach();
  } catch (const std::system_error&) {  // no thread: the connection is closed
    LeavePlace(kind);
  }
}

bool HttpServer::TakePlace(Kind kind) {
  const std::array<int, kNumKinds> most = {options_.max_pages, options_.max_streams,
                                           kMaxHealthAnswers};
  const std::lock_guard lock(mutex_);
  int& num_answers = num_answers_[static_cast<size_t>(kind)];
  if (num_answers == most[static_cast<size_t>(kind)]) return false;
  ++num_answers;
  return true;
}

void HttpServer::LeavePlace(Kind kind) {
  // Under the lock: Stop may return, and this object go, once the lock is free.
  const std::lock_guard lock(mutex_);
  --num_answers_[static_cast<size_t>(kind)];
  changed_.notify_all();
}

}  // namespace isobit
