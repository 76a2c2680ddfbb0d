// The isobit-scorer process: how it starts, drains and ends.
#include <grpcpp/client_context.h>
#include <signal.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/rpc/channel.h"
#include "gtest/gtest.h"
#include "isobit/v1/scorer.grpc.pb.h"
#include "tests/support/server_process.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tools/model_shapes.h"
#include "tools/random_model.h"

namespace isobit {
namespace {

using std::chrono::milliseconds;
using testing_support::Health;
using testing_support::PortIn;
using testing_support::ServerProcess;

constexpr char kName[] = "isobit.v1.ScorerService";

class ScorerProcessTest : public testing::Test {
 protected:
  ScorerProcessTest() {
    ISOBIT_EXPECT_OK(MakeRandomModel(NamedModelShape("tiny-llama").value(), 1, dir_.File("model")));
  }

  std::vector<std::string> Flags(const std::string& last) const {
    return {"--model_root=" + dir_.path(), "--model=model", last};
  }

  const testing_support::TempDir dir_;
};

TEST_F(ScorerProcessTest, SigtermDrainsACallInFlightAndExitsZero) {
  std::vector<std::string> flags = Flags("--max_batch_tokens=50");
  flags.push_back("--drain_timeout_ms=120000");  // a sanitizer on a busy machine is slow
  ServerProcess process(ISOBIT_SCORER, flags);
  const std::shared_ptr<grpc::Channel> channel = process.Connect();
  for (int i = 0; i < 3000 && Health(*channel, kName) != "SERVING"; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  const auto stub = v1::ScorerService::NewStub(channel);
  v1::ScoreRequest request;
  for (int s = 0; s < 400; ++s) {
    v1::ScoreSequence& sequence = *request.add_sequences();
    sequence.add_prompt_token_ids(7);
    for (uint32_t t = 0; t < 49; ++t) sequence.add_completion_token_ids((t * 31 + 5) % 499);
  }
  grpc::ClientContext context;
  const auto reader = stub->Score(&context, request);
  v1::ScoreResponse response;
  ASSERT_TRUE(reader->Read(&response));

  process.Signal(SIGTERM);
  for (int i = 0; i < 3000 && Health(*channel, kName) == "SERVING"; ++i) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_NE(Health(*channel, kName), "SERVING");
  grpc::ClientContext late;
  const auto refused = stub->Score(&late, request);
  EXPECT_EQ(refused->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);

  int count = 1;
  while (reader->Read(&response)) ++count;
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(count, 400);
  EXPECT_EQ(process.Join(), 0);
}

TEST_F(ScorerProcessTest, BadFlagsExitTwo) {
  for (const char* flag : {"--shards=0",
                           "--shards=65",
                           "--shards=x",
                           "--threads_per_rank=0",
                           "--numerics=exact",
                           "--isa=mmx",
                           "--max_batch_tokens=0",
                           "--max_context=-1",
                           "--max_sequences=0",
                           "--max_queued_sequences=1",
                           "--max_logprobs=-1",
                           "--model_root=",
                           "--model=",
                           "--backend=tpu",
                           "--devices=0",
                           "--devices=0,0",
                           "--devices=0,x",
                           "--gather_timeout_seconds=0",
                           "--world_size=2",
                           "--world_size=0",
                           "--rank=1"}) {
    ServerProcess process(ISOBIT_SCORER, Flags(flag));
    EXPECT_EQ(process.Join(), 2) << flag;
  }
}

// torchrun starts all processes of a host with the same flags; only the environment differs.
TEST_F(ScorerProcessTest, ALaterProcessOfAHostTakesAPortOfItsOwn) {
  ServerProcess first(ISOBIT_SCORER, Flags("--port_file=" + dir_.File("port")));
  const int port = PortIn(dir_.File("port"));
  ASSERT_GT(port, 0);
  std::vector<std::string> flags = Flags("--port_file=" + dir_.File("port"));
  flags.insert(flags.end(), {"--backend=cuda", absl::StrCat("--port=", port)});
  ServerProcess second(
      ISOBIT_SCORER, flags,
      {"WORLD_SIZE=2", "RANK=1", "LOCAL_RANK=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1"});
  const int other_port = PortIn(dir_.File("port.1"));
  EXPECT_NE(other_port, 0);
  EXPECT_NE(other_port, port);
  EXPECT_EQ(PortIn(dir_.File("port")), port);
  EXPECT_EQ(Health(*MakeChannel(absl::StrCat("127.0.0.1:", other_port)), ""), "NOT_SERVING");
  second.Signal(SIGTERM);
  EXPECT_EQ(second.Join(), 0);
}

TEST_F(ScorerProcessTest, AModelThatCannotBeLoadedExitsOne) {
  for (const char* flag : {"--model=absent", "--model=../model", "--max_context=2049"}) {
    ServerProcess process(ISOBIT_SCORER, Flags(flag));
    EXPECT_EQ(process.Join(), 1) << flag;
  }
}

}  // namespace
}  // namespace isobit
