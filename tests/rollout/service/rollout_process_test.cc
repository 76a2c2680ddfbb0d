// The isobit-rollout binary: its flags, its health while it loads, and how it ends.
#include <grpcpp/client_context.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using testing_support::Health;
using testing_support::ServerProcess;

constexpr char kService[] = "isobit.v1.RolloutService";

class RolloutProcessTest : public testing::Test {
 protected:
  RolloutProcessTest() {
    testing_support::WriteTinyModel(testing_support::TinyConfig(Architecture::kLlama), 1,
                                    root_.File("tiny"));
  }

  std::vector<std::string> Flags(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"--model_root=" + root_.path(), "--model=tiny"});
    return more;
  }

  static void AwaitServing(grpc::Channel& channel) {
    for (int i = 0; i < 1000 && Health(channel, kService) != "SERVING"; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ASSERT_EQ(Health(channel, kService), "SERVING");
    ASSERT_EQ(Health(channel, ""), "SERVING");
  }

  testing_support::TempDir root_;
};

v1::GenerateRequest LongRequest() {
  v1::GenerateRequest request;
  request.add_prompt_token_ids(3);
  request.mutable_sampling()->set_max_tokens(400);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

TEST_F(RolloutProcessTest, SigtermLetsACallInFlightFinishAndExitsZero) {
  ServerProcess process(ROLLOUT_BINARY, Flags());
  const auto channel = process.Connect();
  AwaitServing(*channel);
  const auto stub = v1::RolloutService::NewStub(channel);
  grpc::ClientContext context;
  const auto reader = stub->Generate(&context, LongRequest());
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  process.Signal(SIGTERM);
  while (reader->Read(&response)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(response.complete().finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(response.complete().num_completion_tokens(), 400u);
  EXPECT_EQ(process.Join(), 0);
}

TEST_F(RolloutProcessTest, SigtermEndsPausedCallsAndExitsZero) {
  ServerProcess process(ROLLOUT_BINARY, Flags());
  const auto channel = process.Connect();
  AwaitServing(*channel);
  const auto stub = v1::RolloutService::NewStub(channel);
  grpc::ClientContext context;
  const auto reader = stub->Generate(&context, LongRequest());
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  v1::PauseGenerationRequest keep;
  keep.set_mode(v1::PAUSE_MODE_KEEP);
  v1::PauseGenerationResponse paused;
  grpc::ClientContext pause_context;
  ASSERT_TRUE(stub->PauseGeneration(&pause_context, keep, &paused).ok());
  process.Signal(SIGTERM);
  while (reader->Read(&response)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(response.complete().finish_reason() == v1::FINISH_REASON_ABORT, paused.num_kept() == 1);
  EXPECT_EQ(process.Join(), 0);
}

TEST_F(RolloutProcessTest, IsNotServingWithoutWeightsAndExitsOne) {
  std::filesystem::resize_file(root_.File("tiny/model.safetensors"), 1000);
  ServerProcess process(ROLLOUT_BINARY, Flags());
  const auto channel = process.Connect();
  EXPECT_NE(Health(*channel, kService), "SERVING");
  EXPECT_EQ(process.Join(), 1);
}

TEST_F(RolloutProcessTest, ARankThatFailsEndsItAndExitsOne) {
  ServerProcess process(FAULTY_ROLLOUT_BINARY, Flags({"--inject_gpu_fault=1:50"}));
  const auto channel = process.Connect();
  AwaitServing(*channel);
  const auto stub = v1::RolloutService::NewStub(channel);
  grpc::ClientContext context;
  const auto reader = stub->Generate(&context, LongRequest());
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    EXPECT_FALSE(response.has_complete());
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(process.Join(), 1);
  ServerProcess misused(FAULTY_ROLLOUT_BINARY, Flags({"--inject_gpu_fault=one"}));
  EXPECT_EQ(misused.Join(), 2);
}

TEST_F(RolloutProcessTest, RefusesBadFlags) {
  const std::vector<std::string> kBad[] = {
      {"--model="},
      {"--tp_size=3"},
      {"--tp_size=-1"},
      {"--numerics=fast"},
      {"--page_size=0"},
      {"--max_running=-1"},
      {"--max_running=65536", "--max_batch_tokens=65536"},
      {"--max_batch_tokens=8", "--max_running=9"},
      {"--isa=mmx"},
      {"--threads_per_rank=0"},
      {"--devices=0,1"},
      {"--gpu_memory_fraction=0"},
      {"--inject_gpu_fault=0:5"},  // only the tests' program has it
      {"--peer_timeout_ms=0"},
  };
  for (const std::vector<std::string>& flags : kBad) {
    ServerProcess process(ROLLOUT_BINARY, Flags(flags));
    EXPECT_EQ(process.Join(), 2) << flags[0];
  }
}

}  // namespace
}  // namespace isobit
