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

class HttpServerTest : public ::testing::Test {
 protected:
  void Start(int max_connections = 32) {
    auto server = HttpServer::Listen({.max_connections = max_connections});
    ISOBIT_ASSERT_OK(server.status());
    server_ = *std::move(server);
    server_->Get("/hello", [](const httplib::Request&, httplib::Response& response) {
      response.set_content("hello\n", "text/plain");
    });
    server_->Get("/stream", [this](const httplib::Request&, httplib::Response& response) {
      response.set_chunked_content_provider("text/event-stream",
                                            [this](size_t, httplib::DataSink& sink) {
                                              if (!sink.write("tick\n", 5)) return false;
                                              ++num_ticks_;
                                              return server_->Rest(milliseconds(10));
                                            });
    });
    server_->Start();
  }

  std::string Ask(const std::string& request) {
    const Descriptor socket = Connect(server_->port());
    EXPECT_TRUE(Send(socket, request));
    return ReadAll(socket);
  }

  std::atomic<int> num_ticks_ = 0;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersOneRequestAConnection) {
  Start();
  const std::string answer = Ask("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Connection: close\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Security-Policy: default-src 'none'"));
  EXPECT_THAT(answer, ::testing::EndsWith("\r\n\r\nhello\n<closed>"));
  EXPECT_THAT(Ask("GET /other HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Ask("POST /hello HTTP/1.1\r\nContent-Length: 1\r\n\r\nx"),
              StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Ask("nonsense\r\n\r\n"), StartsWith("HTTP/1.1 400"));
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

TEST_F(HttpServerTest, ASlowRequestIsCutOff) {
  Start();
  const Descriptor socket = Connect(server_->port());
  const auto begin = steady_clock::now();
  // A byte every 100 ms, which a limit for each read would let pass.
  while (steady_clock::now() < begin + 3 * HttpStream::kRequestTimeout && Send(socket, "G")) {
    std::this_thread::sleep_for(milliseconds(100));
  }
  const auto taken = steady_clock::now() - begin;
  EXPECT_GE(taken, HttpStream::kRequestTimeout / 2);
  EXPECT_LE(taken, 2 * HttpStream::kRequestTimeout);
}

TEST_F(HttpServerTest, TooManyConnectionsAreClosedAtOnce) {
  Start(/*max_connections=*/4);
  std::vector<Descriptor> idle;
  for (int i = 0; i < 4; ++i) idle.push_back(Connect(server_->port()));
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_EQ(ReadAll(Connect(server_->port())), "<closed>");
  idle.clear();
  // Places are free again once the threads have seen the end.
  for (int i = 0; i < 100; ++i) {
    if (Ask("GET /hello HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200")) return;
    std::this_thread::sleep_for(milliseconds(20));
  }
  FAIL() << "no place became free";
}

TEST_F(HttpServerTest, StopEndsStreamsAtOnce) {
  Start();
  const Descriptor reader = Connect(server_->port());
  ASSERT_TRUE(Send(reader, "GET /stream HTTP/1.1\r\n\r\n"));
  while (num_ticks_ < 3) std::this_thread::sleep_for(milliseconds(5));
  const auto begin = steady_clock::now();
  server_->Stop();
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(2));
  const std::string text = ReadAll(reader);
  EXPECT_THAT(text, HasSubstr("tick\n"));
  EXPECT_THAT(text, ::testing::EndsWith("<closed>"));
}

TEST_F(HttpServerTest, AReaderWhoHasGoneEndsItsStream) {
  Start(/*max_connections=*/1);
  for (int i = 0; i < 3; ++i) {
    const int before = num_ticks_;
    const Descriptor reader = Connect(server_->port());
    ASSERT_TRUE(Send(reader, "GET /stream HTTP/1.1\r\n\r\n"));
    // The only place: the reader before has left it.
    for (int tries = 0; tries < 40 && num_ticks_ == before; ++tries) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    if (num_ticks_ == before && i > 0) --i;  // closed at once, as the place was not free yet
  }
}

TEST_F(HttpServerTest, APortInUseIsAnError) {
  Start();
  const auto second = HttpServer::Listen({.port = server_->port()});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace isobit
