// Accepting connections: addresses, the bound, and a lack of descriptors, with a real server.
#include "common/rpc/connection_acceptor.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/base/descriptor.h"
#include "common/rpc/channel.h"
#include "common/rpc/server_runner.h"
#include "gtest/gtest.h"
#include "tests/support/metric_value.h"
#include "tests/support/server_process.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using std::chrono::milliseconds;
using testing_support::Health;
using testing_support::MetricValue;
using testing_support::StatusIs;

Descriptor NewSocket() { return Descriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

void Connect(const Descriptor& socket, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
}

Descriptor ConnectTo(int port) {
  Descriptor socket = NewSocket();
  Connect(socket, port);
  return socket;
}

// From `address` of the loopback net.
Descriptor ConnectFrom(const char* address, int port) {
  Descriptor socket = NewSocket();
  sockaddr_in own{};
  own.sin_family = AF_INET;
  EXPECT_EQ(inet_pton(AF_INET, address, &own.sin_addr), 1);
  EXPECT_EQ(bind(socket.get(), reinterpret_cast<sockaddr*>(&own), sizeof own), 0);
  Connect(socket, port);
  return socket;
}

// True if gRPC greets the connection with its settings. Otherwise waits until the connection is
// closed.
bool IsServed(const Descriptor& socket) {
  pollfd event = {socket.get(), POLLIN, 0};
  EXPECT_EQ(poll(&event, 1, 10000), 1) << "neither greeted nor closed";
  char byte;
  return recv(socket.get(), &byte, 1, MSG_PEEK) == 1;
}

std::string HealthAt(const std::string& host, int port) {
  return Health(*MakeChannel(HostAndPort(host, port)), "");
}

double Refused(const Metrics& metrics) {
  return MetricValue(metrics, "isobit_connections_refused_total", {{"listener", "main"}});
}

// A server that is up as long as this lives.
class RunningServer {
 public:
  explicit RunningServer(ServerOptions options) : runner_(std::move(options)) {
    started_ = runner_.Start();
    if (started_.ok()) runner_.SetServing(true);
  }
  const absl::Status& started() const { return started_; }
  int port() const { return runner_.port(); }

 private:
  ServerRunner runner_;
  absl::Status started_;
};

TEST(ConnectionAcceptorTest, ListensOnWhatAnAddressOrNameStandsFor) {
  struct Case {
    std::string host;
    std::vector<std::string> reached_by;
  };
  std::vector<Case> cases = {
      {"127.0.0.1", {"127.0.0.1"}}, {"0.0.0.0", {"127.0.0.1"}}, {"localhost", {"127.0.0.1"}}};
  if (Descriptor(socket(AF_INET6, SOCK_STREAM, 0)).is_open()) {
    cases.push_back({"::", {"127.0.0.1", "::1"}});
    cases.push_back({"[::1]", {"::1"}});
  }
  for (const Case& c : cases) {
    const RunningServer server({.host = c.host});
    ISOBIT_ASSERT_OK(server.started());
    for (const std::string& address : c.reached_by) {
      EXPECT_EQ(HealthAt(address, server.port()), "SERVING") << c.host << " by " << address;
    }
  }
  EXPECT_THAT(RunningServer({.host = "no-such-host.invalid"}).started(),
              StatusIs(absl::StatusCode::kUnavailable, testing::HasSubstr("no-such-host.invalid")));
}

TEST(ConnectionAcceptorTest, TwoServersNeverShareAPort) {
  const RunningServer first({.host = "127.0.0.1"});
  ISOBIT_ASSERT_OK(first.started());
  EXPECT_THAT(
      RunningServer({.host = "127.0.0.1", .port = first.port()}).started(),
      StatusIs(absl::StatusCode::kUnavailable, testing::HasSubstr("Address already in use")));
}

TEST(ConnectionAcceptorTest, TheCapIsBoundedByTheDescriptorLimit) {
  const int64_t limit = RaiseDescriptorLimit();
  const int64_t most = limit - ConnectionAcceptor::kReservedDescriptors;
  ISOBIT_EXPECT_OK(RunningServer({.max_connections = most}).started());
  for (const int64_t wrong : {int64_t{-1}, most + 1}) {
    EXPECT_THAT(RunningServer({.max_connections = wrong}).started(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         testing::HasSubstr(absl::StrCat("max_connections: ", wrong))));
  }
}

TEST(ConnectionAcceptorTest, ClosesWhatComesBeyondTheCapAndServesAgainOnceOneHasLeft) {
  constexpr int kCap = 3;
  const auto metrics = std::make_shared<Metrics>();
  const RunningServer server({.max_connections = kCap, .metrics = metrics});
  ISOBIT_ASSERT_OK(server.started());
  const auto client = MakeChannel(HostAndPort("127.0.0.1", server.port()));
  EXPECT_EQ(Health(*client, ""), "SERVING");
  for (int round = 0; round < 20; ++round) {
    // The client and two more; those of the round before are gone.
    std::vector<Descriptor> idle;
    for (int attempt = 0; attempt < 1000 && idle.size() + 1 < kCap; ++attempt) {
      Descriptor socket = ConnectTo(server.port());
      if (IsServed(socket)) {
        idle.push_back(std::move(socket));
      } else {
        std::this_thread::sleep_for(milliseconds(10));  // gRPC has yet to close what left
      }
    }
    ASSERT_EQ(idle.size() + 1, kCap) << "round " << round;
    const double refused = Refused(*metrics);
    for (int i = 0; i < 10; ++i) EXPECT_FALSE(IsServed(ConnectTo(server.port())));
    EXPECT_EQ(Refused(*metrics), refused + 10);
    EXPECT_EQ(Health(*client, ""), "SERVING") << "round " << round;
  }
  EXPECT_EQ(MetricValue(*metrics, "isobit_connections_accepted_total", {{"listener", "main"}}),
            1 + 20 * (kCap - 1));
}

TEST(ConnectionAcceptorTest, OneAddressDoesNotTakeAllPlaces) {
  const RunningServer server({.max_connections = 6, .max_connections_per_address = 2});
  ISOBIT_ASSERT_OK(server.started());
  std::vector<Descriptor> idle;
  for (const char* address : {"127.0.0.2", "127.0.0.3"}) {
    for (int i = 0; i < 2; ++i) {
      idle.push_back(ConnectFrom(address, server.port()));
      EXPECT_TRUE(IsServed(idle.back())) << address;
    }
    for (int i = 0; i < 10; ++i) EXPECT_FALSE(IsServed(ConnectFrom(address, server.port())));
  }
  EXPECT_EQ(HealthAt("127.0.0.1", server.port()), "SERVING");
  EXPECT_THAT(RunningServer({.max_connections_per_address = -1}).started(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       testing::HasSubstr("max_connections_per_address: -1")));
}

// Takes all descriptors that the process may have, as long as it lives.
class NoDescriptors {
 public:
  NoDescriptors() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit low = {256, before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &low);
    while (true) {
      Descriptor taken(open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (!taken.is_open()) break;
      taken_.push_back(std::move(taken));
    }
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_;
  std::vector<Descriptor> taken_;
};

TEST(ConnectionAcceptorTest, RecoversFromTheWantOfDescriptors) {
  const RunningServer server(ServerOptions{});
  ISOBIT_ASSERT_OK(server.started());
  const auto client = MakeChannel(HostAndPort("127.0.0.1", server.port()));
  EXPECT_EQ(Health(*client, ""), "SERVING");
  std::vector<Descriptor> sockets;
  for (int i = 0; i < 4; ++i) sockets.push_back(NewSocket());
  {
    const NoDescriptors none;
    for (const Descriptor& socket : sockets) {
      Connect(socket, server.port());
      EXPECT_FALSE(IsServed(socket)) << "where from was the descriptor?";
    }
    EXPECT_EQ(Health(*client, ""), "SERVING") << "a client that was there before";
  }
  EXPECT_TRUE(IsServed(ConnectTo(server.port()))) << "a new client after";
}

}  // namespace
}  // namespace isobit
