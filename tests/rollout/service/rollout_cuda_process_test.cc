// isobit-rollout on GPUs as a process: its flags reach the GPUs, and a fault on one of them ends
// it.
#include <grpcpp/client_context.h>
#include <signal.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "kernels/cuda/sm90/device/device_info.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using testing_support::Health;
using testing_support::ServerProcess;

constexpr char kService[] = "isobit.v1.RolloutService";

class RolloutCudaProcessTest : public testing::Test {
 protected:
  RolloutCudaProcessTest() {
    testing_support::WriteTinyModel(testing_support::TinyConfig(Architecture::kLlama), 1,
                                    root_.File("tiny"));
  }

  void SetUp() override {
    const auto info = cuda::GetDeviceInfo(0);
    if (!info.ok()) GTEST_SKIP() << "SKIPPED, no Hopper GPU: " << info.status().message();
    ranks_ = cuda::GetDeviceInfo(3).ok() ? 4 : cuda::GetDeviceInfo(1).ok() ? 2 : 1;
  }

  std::vector<std::string> Flags(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"--model_root=" + root_.path(), "--model=tiny", "--backend=cuda",
                               "--tp_size=" + std::to_string(ranks_), "--gpu_memory_fraction=0.1"});
    return more;
  }

  static void AwaitServing(grpc::Channel& channel) {
    for (int i = 0; i < 3000 && Health(channel, kService) != "SERVING"; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ASSERT_EQ(Health(channel, kService), "SERVING");
  }

  static v1::GenerateRequest Request() {
    v1::GenerateRequest request;
    request.add_prompt_token_ids(3);
    request.mutable_sampling()->set_max_tokens(400);
    request.mutable_sampling()->set_ignore_eos(true);
    return request;
  }

  testing_support::TempDir root_;
  int ranks_ = 1;
};

TEST_F(RolloutCudaProcessTest, GeneratesAndDrains) {
  ServerProcess process(ROLLOUT_BINARY, Flags());
  const auto channel = process.Connect();
  AwaitServing(*channel);
  const auto stub = v1::RolloutService::NewStub(channel);
  grpc::ClientContext context;
  const auto reader = stub->Generate(&context, Request());
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  process.Signal(SIGTERM);
  while (reader->Read(&response)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(response.complete().num_completion_tokens(), 400u);
  EXPECT_EQ(process.Join(), 0);
}

TEST_F(RolloutCudaProcessTest, AFaultOnAGpuEndsTheServiceWithinTenSeconds) {
  ServerProcess process(FAULTY_ROLLOUT_BINARY,
                        Flags({"--inject_gpu_fault=" + std::to_string(ranks_ - 1) + ":50"}));
  const auto channel = process.Connect();
  AwaitServing(*channel);
  const auto stub = v1::RolloutService::NewStub(channel);
  grpc::ClientContext context;
  const auto reader = stub->Generate(&context, Request());
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  const auto start = std::chrono::steady_clock::now();
  while (reader->Read(&response)) {
    EXPECT_FALSE(response.has_complete());
  }
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  EXPECT_NE(Health(*channel, kService), "SERVING");
  EXPECT_EQ(process.Join(), 1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST_F(RolloutCudaProcessTest, ADeviceThatIsNotThereExitsOne) {
  ServerProcess process(ROLLOUT_BINARY, Flags({"--devices=99", "--tp_size=1"}));
  EXPECT_EQ(process.Join(), 1);
}

}  // namespace
}  // namespace isobit
