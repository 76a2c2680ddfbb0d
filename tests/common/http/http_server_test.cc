// HttpServer: what it serves, and what callers who misbehave cannot do to it.
#include "common/http/http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/http/http_stream.h"
#include "common/http/metrics_page.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Descriptor Connect(int port) {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  return socket;
}

// False: the other side has closed.
bool Send(const Descriptor& socket, const std::string& text) {
  return send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(text.size());
}

// All that comes until the other side closes, or for `limit`.
std::string ReadAll(const Descriptor& socket, milliseconds limit = milliseconds(5000)) {
  std::string text;
  std::string buffer(4096, '\0');
  const auto deadline = steady_clock::now() + limit;
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    pollfd event = {socket.get(), POLLIN, 0};
    if (left.count() <= 0 || poll(&event, 1, static_cast<int>(left.count())) <= 0) return text;
    const ssize_t got = recv(socket.get(), buffer.data(), buffer.size(), 0);
    if (got <= 0) return text + "<closed>";
    text.append(buffer, 0, static_cast<size_t>(got));
  }
}

// A request of HTTP/1.1 for `path`, with `headers` behind Host.
std::string Get(const std::string& path, const std::string& headers = "") {
  return "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n" + headers + "\r\n";
}

class HttpServerTest : public ::testing::Test {
 protected:
  void Start(const HttpServer::Options& options = {}) {
    auto server = HttpServer::Listen(options);
    ISOBIT_ASSERT_OK(server.status());
    server_ = *std::move(server);
    server_->Get("/hello", [](const httplib::Request&, httplib::Response& response) {
      response.set_content("hello\n", "text/plain");
    });
    server_->Get("/gate", [this](const httplib::Request&, httplib::Response& response) {
      ++num_at_gate_;
      gate_.wait(false);
      response.set_content("open\n", "text/plain");
    });
    server_->GetOpen(
        "/healthz",
        [](const httplib::Request&, httplib::Response& response) {
          response.set_content("alive\n", "text/plain");
        },
        HttpServer::Kind::kHealth);
    server_->Get(
        "/stream",
        [this](const httplib::Request&, httplib::Response& response) {
          response.set_chunked_content_provider("text/event-stream",
                                                [this](size_t, httplib::DataSink& sink) {
                                                  if (!sink.write("tick\n", 5)) return false;
                                                  ++num_ticks_;
                                                  return server_->Rest(milliseconds(10));
                                                });
        },
        HttpServer::Kind::kStream);
    server_->Start();
  }

  void OpenGate() {
    gate_ = true;
    gate_.notify_all();
  }

  std::string Ask(const std::string& request) {
    const Descriptor socket = Connect(server_->port());
    EXPECT_TRUE(Send(socket, request));
    return ReadAll(socket);
  }

  // Connections that have sent `text`, half a request.
  std::vector<Descriptor> Halves(size_t count, const std::string& text) {
    std::vector<Descriptor> halves;
    for (size_t i = 0; i < count; ++i) {
      halves.push_back(Connect(server_->port()));
      EXPECT_TRUE(Send(halves.back(), text));
    }
    return halves;
  }

  std::atomic<int> num_ticks_ = 0;
  std::atomic<int> num_at_gate_ = 0;
  std::atomic<bool> gate_ = false;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersOneRequestAConnection) {
  Start();
  const std::string answer = Ask(Get("/hello"));
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Connection: close\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Security-Policy: default-src 'none'"));
  EXPECT_THAT(answer, ::testing::EndsWith("\r\n\r\nhello\n<closed>"));
  EXPECT_THAT(Ask(Get("/hello?a=%41")), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Ask(Get("/other")), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Ask(Get("/%68ello")), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Ask("HEAD /hello HTTP/1.1\r\nHost: localhost\r\n\r\n"),
              ::testing::EndsWith("\r\n\r\n<closed>"));
  EXPECT_THAT(Ask("nonsense\r\n\r\n"), StartsWith("HTTP/1.1 400"));
}

// A body that never comes must not be waited for.
TEST_F(HttpServerTest, OtherMethodsAreRefusedBeforeTheirBody) {
  Start();
  for (const char* method : {"POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PRI"}) {
    const std::string answer =
        Ask(std::string(method) + " /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n");
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 405")) << method;
    EXPECT_THAT(answer, HasSubstr("Allow: GET, HEAD\r\n")) << method;
  }
}

// The library would build an answer of 2,700 parts in memory.
TEST_F(HttpServerTest, NeitherRangesNorCompression) {
  Start();
  std::string ranges = "Range: bytes=0-";
  for (int i = 0; i < 2700; ++i) ranges += ",0-";
  for (const std::string& headers : {std::string("Range: bytes=0-1\r\n"), ranges + "\r\n",
                                     std::string("Accept-Encoding: gzip, br\r\n")}) {
    const std::string answer = Ask(Get("/hello", headers));
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
    EXPECT_THAT(answer, HasSubstr("Content-Length: 6\r\n"));
    EXPECT_THAT(answer, ::testing::EndsWith("\r\n\r\nhello\n<closed>"));
  }
}

TEST_F(HttpServerTest, OnlyKnownNamesMayCall) {
  Start({.host_names = {"metrics.example"}});
  const auto ask = [&](const std::string& path, const std::string& host) {
    return Ask("GET " + path + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n");
  };
  EXPECT_THAT(ask("/hello", "metrics.example:9100"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(ask("/hello", "127.0.0.1"), StartsWith("HTTP/1.1 200"));
  for (const char* path : {"/hello", "/stream", "/other"}) {
    EXPECT_THAT(ask(path, "rebound.example:9100"), StartsWith("HTTP/1.1 421")) << path;
  }
  EXPECT_THAT(ask("/healthz", "rebound.example"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Ask("GET /hello HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Ask("GET /hello HTTP/1.0\r\n\r\n"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, ServesMetricsAsTheyAreNow) {
  Start();
  const auto metrics = std::make_shared<Metrics>();
  prometheus::Counter& counter = metrics->AddCounter("isobit_things_total", "Things.");
  auto server = HttpServer::Listen({});
  ISOBIT_ASSERT_OK(server.status());
  AddMetricsPage(**server, metrics);
  (*server)->Start();
  httplib::Client client("127.0.0.1", (*server)->port());
  EXPECT_THAT(client.Get("/metrics")->body, HasSubstr("\nisobit_things_total 0\n"));
  counter.Increment(3);
  const auto answer = client.Get("/metrics");
  EXPECT_THAT(answer->body, HasSubstr("\nisobit_things_total 3\n"));
  EXPECT_EQ(answer->get_header_value("Content-Type"), "text/plain; version=0.0.4; charset=utf-8");
}

TEST_F(HttpServerTest, ARequestHasABoundedSize) {
  Start();
  const Descriptor socket = Connect(server_->port());
  ASSERT_TRUE(Send(socket, "GET /hello HTTP/1.1\r\n"));
  const std::string header = "X-Header: " + std::string(1000, 'x') + "\r\n";
  size_t sent = 0;
  // The kernel's buffers take some more before the closed connection shows.
  while (sent < (size_t{64} << 20) && Send(socket, header)) sent += header.size();
  EXPECT_LT(sent, size_t{64} << 20);
}

// A byte every 100 ms, which a limit for each read would let pass.
TEST_F(HttpServerTest, ASlowRequestIsCutOff) {
  Start();
  const Descriptor socket = Connect(server_->port());
  const auto begin = steady_clock::now();
  int sent = 0;
  while (sent < 1000 && Send(socket, "G")) {
    ++sent;
    std::this_thread::sleep_for(milliseconds(100));
  }
  EXPECT_LT(sent, 1000);
  EXPECT_GE(steady_clock::now() - begin, HttpServer::kRequestTimeout / 2);
}

TEST_F(HttpServerTest, HalfRequestsHoldNoPlace) {
  Start({.max_pages = 1});
  const std::vector<Descriptor> halves =
      Halves(2 * HttpServer::kMaxWaiting, "GET /hello HTTP/1.1\r\nX: ");
  EXPECT_THAT(Ask(Get("/healthz")), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Ask(Get("/hello")), StartsWith("HTTP/1.1 200"));
  // The oldest had to make room.
  EXPECT_EQ(ReadAll(halves.front()), "<closed>");
}

TEST_F(HttpServerTest, StopDoesNotWaitForHalfARequest) {
  Start();
  const std::vector<Descriptor> halves = Halves(3, "GET /hello HTTP/1.1\r\nX: ");
  EXPECT_THAT(Ask(Get("/hello")), StartsWith("HTTP/1.1 200"));  // the halves are accepted
  const auto begin = steady_clock::now();
  server_->Stop();
  EXPECT_LT(steady_clock::now() - begin, HttpServer::kRequestTimeout - milliseconds(500));
  for (const Descriptor& half : halves) EXPECT_EQ(ReadAll(half), "<closed>");
}

TEST_F(HttpServerTest, PagesStreamsAndHealthHavePlacesOfTheirOwn) {
  Start({.max_pages = 1, .max_streams = 2});
  const Descriptor at_gate = Connect(server_->port());
  ASSERT_TRUE(Send(at_gate, Get("/gate")));
  while (num_at_gate_ == 0) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_THAT(Ask(Get("/hello")), StartsWith("HTTP/1.1 503"));

  std::vector<Descriptor> readers;
  for (int i = 0; i < 2; ++i) {
    readers.push_back(Connect(server_->port()));
    ASSERT_TRUE(Send(readers.back(), Get("/stream")));
    std::string first(12, '\0');
    ASSERT_EQ(recv(readers.back().get(), first.data(), first.size(), MSG_WAITALL), 12);
    ASSERT_EQ(first, "HTTP/1.1 200");
  }
  const std::string refused = Ask(Get("/stream"));
  EXPECT_THAT(refused, StartsWith("HTTP/1.1 503"));
  EXPECT_THAT(refused, HasSubstr("Retry-After: "));
  EXPECT_THAT(Ask(Get("/healthz")), StartsWith("HTTP/1.1 200"));

  OpenGate();
  EXPECT_THAT(ReadAll(at_gate), ::testing::EndsWith("open\n<closed>"));
  // The place is free soon after its reader has seen the end, not before.
  while (!Ask(Get("/hello")).starts_with("HTTP/1.1 200")) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

TEST_F(HttpServerTest, StopEndsStreamsAtOnce) {
  Start();
  const Descriptor reader = Connect(server_->port());
  ASSERT_TRUE(Send(reader, Get("/stream")));
  while (num_ticks_ < 3) std::this_thread::sleep_for(milliseconds(5));
  const auto begin = steady_clock::now();
  server_->Stop();
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(2));
  const std::string text = ReadAll(reader);
  EXPECT_THAT(text, HasSubstr("tick\n"));
  EXPECT_THAT(text, ::testing::EndsWith("<closed>"));
}

TEST_F(HttpServerTest, AReaderWhoHasGoneEndsItsStream) {
  Start({.max_streams = 1});
  for (int i = 0; i < 3; ++i) {
    // The only place is free once the stream of the reader before has seen its end.
    while (true) {
      const Descriptor reader = Connect(server_->port());
      ASSERT_TRUE(Send(reader, Get("/stream")));
      std::string first(12, '\0');
      ASSERT_EQ(recv(reader.get(), first.data(), first.size(), MSG_WAITALL), 12);
      if (first == "HTTP/1.1 200") break;
      ASSERT_EQ(first, "HTTP/1.1 503");
      std::this_thread::sleep_for(milliseconds(5));
    }
  }
}

// It is not waited for longer than kStopTimeout.
TEST_F(HttpServerTest, StopEndsAnAnswerThatNobodyReads) {
  auto server = HttpServer::Listen({});
  ISOBIT_ASSERT_OK(server.status());
  std::atomic<bool> asked = false;
  (*server)->Get("/large", [&](const httplib::Request&, httplib::Response& response) {
    response.set_content(std::string(size_t{64} << 20, 'x'), "text/plain");
    asked = true;
  });
  (*server)->Start();
  const Descriptor reader = Connect((*server)->port());
  ASSERT_TRUE(Send(reader, Get("/large")));
  while (!asked) std::this_thread::sleep_for(milliseconds(1));
  const auto begin = steady_clock::now();
  (*server)->Stop();
  EXPECT_LT(steady_clock::now() - begin, HttpServer::kPageTimeout - std::chrono::seconds(2));
}

TEST_F(HttpServerTest, APortInUseIsAnError) {
  Start();
  const auto second = HttpServer::Listen({.port = server_->port()});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace isobit
