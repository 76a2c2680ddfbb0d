// The life of a server: health in every phase, and how a real process ends on signals and faults.
#include "common/rpc/server_runner.h"

#include <grpcpp/client_context.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/rpc/channel.h"
#include "gtest/gtest.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "tests/support/server_process.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing_support::Health;
using testing_support::StatusIs;

class IdleService final : public v1::RolloutService::CallbackService {};

TEST(ServerRunnerTest, HealthFollowsReadinessAndStopEndsWaitWithZero) {
  IdleService service;
  ServerRunner runner(ServerOptions{});
  runner.Register(&service, v1::RolloutService::service_full_name());
  ISOBIT_ASSERT_OK(runner.Start());
  ASSERT_GT(runner.port(), 0);
  const std::string address = "127.0.0.1:" + std::to_string(runner.port());
  const auto channel = MakeChannel(address);
  ISOBIT_ASSERT_OK(WaitForReady(*channel, address, milliseconds(10000)));

  for (const char* name : {"", "isobit.v1.RolloutService"}) {
    EXPECT_EQ(Health(*channel, name), "NOT_SERVING")
        << "before weights are loaded: '" << name << "'";
  }
  runner.SetServing(true);
  for (const char* name : {"", "isobit.v1.RolloutService"}) {
    EXPECT_EQ(Health(*channel, name), "SERVING") << "'" << name << "'";
  }

  std::string health_while_draining;
  runner.Stop();
  EXPECT_EQ(runner.Wait([&] {
    runner.SetServing(true);  // must have no effect any more
    health_while_draining = Health(*channel, "isobit.v1.RolloutService");
  }),
            0);
  EXPECT_EQ(health_while_draining, "NOT_SERVING");
}

TEST(ServerRunnerTest, BothPortsServeAndEndTogether) {
  const testing_support::TempDir scratch;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ServerSecurity security,
                              MakeServerSecurity({.has_admin_port = true}, "127.0.0.1"));
  IdleService service;
  ServerRunner runner(
      ServerOptions{.security = security, .admin_port = 0, .port_file = scratch.File("port")});
  runner.Register(&service, v1::RolloutService::service_full_name());
  ISOBIT_ASSERT_OK(runner.Start());
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (const char* name : {"port", "port.admin"}) {
    const int port = testing_support::PortIn(scratch.File(name));
    channels.push_back(MakeChannel("127.0.0.1:" + std::to_string(port)));
    EXPECT_EQ(Health(*channels.back(), "isobit.v1.RolloutService"), "NOT_SERVING") << name;
  }
  runner.SetServing(true);
  for (const auto& channel : channels) EXPECT_EQ(Health(*channel, ""), "SERVING");
  runner.Stop();
  EXPECT_EQ(runner.Wait([&] {
    for (const auto& channel : channels) EXPECT_EQ(Health(*channel, ""), "NOT_SERVING");
  }),
            0);
  for (const auto& channel : channels) EXPECT_EQ(Health(*channel, ""), "14") << "unavailable";
}

TEST(ServerRunnerTest, FailTurnsNotServingAndEndsWaitWithOne) {
  IdleService service;
  ServerRunner runner(ServerOptions{});
  runner.Register(&service, v1::RolloutService::service_full_name());
  ISOBIT_ASSERT_OK(runner.Start());
  runner.SetServing(true);
  const auto channel = MakeChannel("127.0.0.1:" + std::to_string(runner.port()));
  EXPECT_EQ(Health(*channel, ""), "SERVING");
  runner.Fail(absl::InternalError("device lost"));
  EXPECT_EQ(Health(*channel, ""), "NOT_SERVING");
  EXPECT_EQ(runner.Wait(), 1);
}

TEST(ServerRunnerTest, RefusesATakenOrImpossiblePort) {
  IdleService service;
  ServerRunner first(ServerOptions{});
  first.Register(&service, v1::RolloutService::service_full_name());
  ISOBIT_ASSERT_OK(first.Start());
  ServerRunner second(ServerOptions{.port = first.port()});
  EXPECT_THAT(second.Start(), StatusIs(absl::StatusCode::kUnavailable));
  ServerRunner third(ServerOptions{.port = 65536});
  EXPECT_THAT(third.Start(),
              StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr("65536")));
}

TEST(ServerRunnerTest, SaysWhenThePortFileCannotBeWritten) {
  IdleService service;
  ServerRunner runner(ServerOptions{.port_file = "/nonexistent/port"});
  runner.Register(&service, v1::RolloutService::service_full_name());
  EXPECT_THAT(runner.Start(),
              StatusIs(absl::StatusCode::kNotFound, testing::HasSubstr("/nonexistent/port")));
}

TEST(ServerRunnerTest, LeavesAPortFileAloneThatIsNone) {
  const testing_support::TempDir scratch;
  const std::string path = scratch.File("fifo");  // a device would be replaced like it
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  ServerRunner runner(ServerOptions{.port_file = path});
  EXPECT_THAT(runner.Start(),
              StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr(path)));
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_TRUE(S_ISFIFO(info.st_mode));
}

TEST(ChannelTest, SaysWhereNobodyListens) {
  const auto channel = MakeChannel("127.0.0.1:1");
  EXPECT_THAT(WaitForReady(*channel, "127.0.0.1:1", milliseconds(200)),
              StatusIs(absl::StatusCode::kUnavailable, testing::HasSubstr("127.0.0.1:1")));
}

// A child process running runner_process.cc.
class RunnerProcess : public testing_support::ServerProcess {
 public:
  explicit RunnerProcess(std::vector<std::string> flags)
      : ServerProcess(RUNNER_PROCESS, std::move(flags)),
        stub_(v1::RolloutService::NewStub(Connect())) {}

  v1::RolloutService::Stub& stub() { return *stub_; }

 private:
  const std::unique_ptr<v1::RolloutService::Stub> stub_;
};

TEST(ServerProcessTest, SigtermLetsACallInFlightFinishAndExitsZero) {
  // An idle client that holds the server does so each time, a loaded machine at most sometimes.
  auto least = std::chrono::steady_clock::duration::max();
  for (int attempt = 0; attempt < 3 && least > seconds(3); ++attempt) {
    RunnerProcess process({});
    grpc::ClientContext context;
    v1::GenerateRequest request;
    request.mutable_sampling()->set_max_tokens(500);
    auto reader = process.stub().Generate(&context, request);
    v1::GenerateResponse response;
    ASSERT_TRUE(reader->Read(&response));
    process.Signal(SIGTERM);
    EXPECT_FALSE(reader->Read(&response));
    EXPECT_TRUE(reader->Finish().ok());
    const auto end = std::chrono::steady_clock::now();
    EXPECT_EQ(process.Join(), 0);
    least = std::min(least, std::chrono::steady_clock::now() - end);
  }
  EXPECT_LT(least, seconds(3)) << "this client, idle now, held the server";
}

TEST(ServerProcessTest, SigintEndsAStuckCallAtTheDrainTimeoutAndExitsZero) {
  RunnerProcess process({"--drain_timeout_ms=300"});
  grpc::ClientContext context;
  v1::GenerateRequest request;
  request.set_request_id("stuck");
  auto reader = process.stub().Generate(&context, request);
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  const auto start = std::chrono::steady_clock::now();
  process.Signal(SIGINT);
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(process.Join(), 0);
  const auto elapsed = std::chrono::steady_clock::now() - start;
  EXPECT_GE(elapsed, milliseconds(250)) << "the drain time was not granted";
  EXPECT_LT(elapsed, milliseconds(20000));
}

// Calls that begin at any moment of the drain, on connections that are open.
TEST(ServerProcessTest, CallsThatMeetTheEndAreUnavailable) {
  constexpr int kThreads = 8;
  std::map<grpc::StatusCode, int> seen;
  for (int round = 0; round < 4; ++round) {
    RunnerProcess process({});
    std::mutex mutex;  // guards seen
    std::atomic<int> num_answered{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        const auto stub = v1::RolloutService::NewStub(process.Connect());
        v1::GenerateRequest request;  // answered at once
        grpc::StatusCode last = grpc::StatusCode::OK;
        while (last == grpc::StatusCode::OK) {
          grpc::ClientContext context;
          v1::GenerateResponse response;
          const auto reader = stub->Generate(&context, request);
          while (reader->Read(&response)) {
          }
          last = reader->Finish().error_code();
          if (last == grpc::StatusCode::OK) ++num_answered;
          const std::lock_guard lock(mutex);
          ++seen[last];
        }
      });
    }
    while (num_answered < 20 * kThreads) std::this_thread::yield();
    process.Signal(SIGTERM);
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(process.Join(), 0);
  }
  EXPECT_EQ(seen[grpc::StatusCode::UNAVAILABLE], 4 * kThreads);
  EXPECT_EQ(seen.size(), 2u) << "only OK besides";
}

TEST(ServerProcessTest, AFaultExitsOne) {
  RunnerProcess process({"--fail_after_ms=50"});
  EXPECT_EQ(process.Join(), 1);
}

}  // namespace
}  // namespace isobit
