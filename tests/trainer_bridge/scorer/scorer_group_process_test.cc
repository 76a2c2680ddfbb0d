// isobit-scorer on GPUs, as one process and as a group of several: the scores have the bits of a
// CPU's, and all processes end together.
#include <arpa/inet.h>
#include <grpcpp/client_context.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "isobit/v1/scorer.grpc.pb.h"
#include "kernels/cuda/sm90/device/device_info.h"
#include "tests/support/server_process.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tools/model_shapes.h"
#include "tools/random_model.h"

namespace isobit {
namespace {

using std::chrono::milliseconds;
using testing_support::Health;
using testing_support::ServerProcess;

constexpr char kName[] = "isobit.v1.ScorerService";

// A port that was free a moment ago.
int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  close(fd);
  return ntohs(address.sin_port);
}

bool WaitForHealth(grpc::Channel& channel, const std::string& expected, milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < deadline) {
    if (Health(channel, kName) == expected) return true;
    std::this_thread::sleep_for(milliseconds(20));
  }
  return false;
}

v1::ScoreRequest Request() {
  v1::ScoreRequest request;
  for (uint32_t s = 0; s < 40; ++s) {
    v1::ScoreSequence& sequence = *request.add_sequences();
    sequence.add_prompt_token_ids(7 + s);
    for (uint32_t t = 0; t < 20 + 3 * s; ++t) {
      sequence.add_completion_token_ids((t * 31 + s * 17 + 5) % 499);
    }
  }
  request.mutable_sampling()->set_temperature(0.8f);
  request.mutable_sampling()->set_top_p(0.95f);
  request.mutable_sampling()->set_logprobs(3);
  request.set_prompt_logprobs(true);
  return request;
}

// Each sequence's tokens, logprobs and alternatives on the wire.
std::map<uint32_t, std::string> Score(grpc::Channel& channel) {
  const auto stub = v1::ScorerService::NewStub({&channel, [](grpc::Channel*) {}});
  grpc::ClientContext context;
  const auto reader = stub->Score(&context, Request());
  std::map<uint32_t, std::string> scores;
  v1::ScoreResponse response;
  while (reader->Read(&response)) {
    scores[response.index()] =
        response.completion().SerializeAsString() + response.prompt().SerializeAsString();
  }
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  return scores;
}

class ScorerGroupProcessTest : public testing::Test {
 protected:
  ScorerGroupProcessTest() {
    ISOBIT_EXPECT_OK(MakeRandomModel(NamedModelShape("tiny-llama").value(), 1, dir_.File("model")));
  }

  void SetUp() override {
    if (const auto device = cuda::GetDeviceInfo(1); !device.ok()) {
      GTEST_SKIP() << "SKIPPED, fewer than two Hopper GPUs: " << device.status().message();
    }
  }

  std::vector<std::string> Flags(const std::vector<std::string>& more) const {
    std::vector<std::string> flags = {"--model_root=" + dir_.path(), "--model=model",
                                      "--max_batch_tokens=300"};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }

  // The processes of one group, each with `local` of the GPUs.
  std::vector<std::unique_ptr<ServerProcess>> StartGroup(int world_size, int local) const {
    const int port = FreePort();
    std::vector<std::unique_ptr<ServerProcess>> processes;
    for (int rank = 0; rank < world_size; ++rank) {
      std::string devices;
      for (int i = 0; i < local; ++i) {
        absl::StrAppend(&devices, i > 0 ? "," : "", rank * local + i);
      }
      processes.push_back(std::make_unique<ServerProcess>(
          ISOBIT_SCORER,
          Flags({"--backend=cuda", absl::StrCat("--shards=", local), "--devices=" + devices,
                 absl::StrCat("--world_size=", world_size), absl::StrCat("--rank=", rank),
                 "--master_addr=127.0.0.1", absl::StrCat("--master_port=", port),
                 "--gather_timeout_seconds=30"})));
    }
    return processes;
  }

  const testing_support::TempDir dir_;
};

TEST_F(ScorerGroupProcessTest, ProcessesOnGpusGiveTheCpusBitsAndEndTogether) {
  ServerProcess cpu(ISOBIT_SCORER, Flags({"--shards=1"}));
  const std::shared_ptr<grpc::Channel> cpu_channel = cpu.Connect();
  ASSERT_TRUE(WaitForHealth(*cpu_channel, "SERVING", milliseconds(30'000)));
  const std::map<uint32_t, std::string> expected = Score(*cpu_channel);
  ASSERT_EQ(expected.size(), 40u);
  for (const auto& [world_size, local] : std::vector<std::pair<int, int>>{{2, 1}, {2, 2}, {4, 1}}) {
    if (!cuda::GetDeviceInfo(world_size * local - 1).ok()) continue;
    const auto group = StartGroup(world_size, local);
    const std::shared_ptr<grpc::Channel> channel = group[0]->Connect();
    ASSERT_TRUE(WaitForHealth(*channel, "SERVING", milliseconds(60'000)));
    EXPECT_EQ(Score(*channel), expected) << world_size << " processes of " << local;
    group[0]->Signal(SIGTERM);
    for (const auto& process : group) EXPECT_EQ(process->Join(), 0);
  }
}

// torchrun starts all processes of a host with the same flags; only the environment differs.
TEST_F(ScorerGroupProcessTest, OneCommandLineServesUnderTorchrun) {
  const int port = FreePort();
  const std::vector<std::string> flags =
      Flags({"--backend=cuda", "--shards=1", absl::StrCat("--port=", port),
             "--gather_timeout_seconds=30"});
  const std::string master_port = absl::StrCat("MASTER_PORT=", FreePort());
  std::vector<std::unique_ptr<ServerProcess>> group;
  for (const int rank : {0, 1}) {
    group.push_back(std::make_unique<ServerProcess>(
        ISOBIT_SCORER, flags,
        std::vector<std::string>{"WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", master_port,
                                 absl::StrCat("RANK=", rank), absl::StrCat("LOCAL_RANK=", rank)}));
  }
  const std::shared_ptr<grpc::Channel> channel = group[0]->Connect();
  ASSERT_TRUE(WaitForHealth(*channel, "SERVING", milliseconds(60'000)));
  EXPECT_EQ(Score(*channel).size(), 40u);
  group[0]->Signal(SIGTERM);
  for (const auto& process : group) EXPECT_EQ(process->Join(), 0);
}

TEST_F(ScorerGroupProcessTest, AKilledMemberEndsTheServiceWithinSeconds) {
  const auto group = StartGroup(2, 1);
  const std::shared_ptr<grpc::Channel> channel = group[0]->Connect();
  ASSERT_TRUE(WaitForHealth(*channel, "SERVING", milliseconds(60'000)));
  EXPECT_EQ(Score(*channel).size(), 40u);
  const auto start = std::chrono::steady_clock::now();
  group[1]->Signal(SIGKILL);
  EXPECT_EQ(group[1]->Join(), -1);
  EXPECT_EQ(group[0]->Join(), 1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST_F(ScorerGroupProcessTest, AStopSignalEndsALeaderWhoseMembersDoNotCome) {
  ServerProcess leader(
      ISOBIT_SCORER,
      Flags({"--backend=cuda", "--world_size=2", "--rank=0", "--master_addr=127.0.0.1",
             absl::StrCat("--master_port=", FreePort()), "--gather_timeout_seconds=60"}));
  const auto channel = leader.Connect();
  EXPECT_TRUE(WaitForHealth(*channel, "NOT_SERVING", milliseconds(10'000)));
  const auto start = std::chrono::steady_clock::now();
  leader.Signal(SIGTERM);
  EXPECT_EQ(leader.Join(), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace isobit
