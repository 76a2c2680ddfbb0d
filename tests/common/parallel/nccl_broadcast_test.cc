// Weights by NCCL's broadcasts, between two threads of this process: a trainer, which does as
// vLLM's PyNcclCommunicator, on GPU 0, and the receiver on GPU 1. What arrives, and that a trainer
// that does not come, is silent or goes holds nobody. With one GPU both are on it, which NCCL
// allows on request.
#include "common/parallel/nccl_broadcast.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/parallel/nccl_group.h"  // NewNcclId
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using absl::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing_support::StatusIs;

constexpr int kTrainer = 0;  // devices
constexpr int kReceiver = 1;

// Rank 0 of a group of two: a blocking communicator, and the sum of one number that follows.
class Trainer {
 public:
  explicit Trainer(const std::string& id) {
    ncclUniqueId unique;
    std::memcpy(unique.internal, id.data(), sizeof(unique.internal));
    EXPECT_EQ(cudaSetDevice(kTrainer), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(ncclCommInitRank(&comm_, 2, unique, 0), ncclSuccess);
    float* one = nullptr;
    EXPECT_EQ(cudaMalloc(&one, sizeof(float)), cudaSuccess);
    EXPECT_EQ(ncclAllReduce(one, one, 1, ncclFloat, ncclSum, comm_, stream_), ncclSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    cudaFree(one);
  }
  ~Trainer() {
    cudaSetDevice(kTrainer);
    ncclCommAbort(comm_);
    cudaStreamDestroy(stream_);
  }
  // type: in which the elements are counted, as for a tensor of that dtype.
  void Broadcast(const std::vector<uint8_t>& bytes, ncclDataType_t type = ncclUint8,
                 size_t size_of_type = 1) {
    EXPECT_EQ(cudaSetDevice(kTrainer), cudaSuccess);
    void* buffer = nullptr;
    EXPECT_EQ(cudaMalloc(&buffer, bytes.size()), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(buffer, bytes.data(), bytes.size(), cudaMemcpyDefault, stream_),
              cudaSuccess);
    EXPECT_EQ(ncclBroadcast(buffer, buffer, bytes.size() / size_of_type, type, 0, comm_, stream_),
              ncclSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    cudaFree(buffer);
  }

 private:
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

std::vector<uint8_t> Pattern(size_t bytes, int round) {
  std::vector<uint8_t> pattern(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    pattern[i] = static_cast<uint8_t>(i * 7 + i / 251 + static_cast<size_t>(round) * 57 + 1);
  }
  return pattern;
}

class NcclBroadcastTest : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count < 2) {
      GTEST_SKIP() << "SKIPPED, it needs two GPUs, and there are " << count;
    }
    ISOBIT_ASSERT_OK_AND_ASSIGN(id_, NewNcclId());
  }
  absl::StatusOr<std::unique_ptr<WeightBroadcast>> Join(milliseconds limit = seconds(60)) const {
    return NcclBroadcastOn(kReceiver)({.id = id_, .rank = 1, .size = 2},
                                      {.deadline = std::chrono::steady_clock::now() + limit});
  }
  // Joins beside the trainer.
  void Meet() {
    auto trainer = std::async(std::launch::async, [&] { return std::make_unique<Trainer>(id_); });
    auto joined = Join();
    trainer_ = trainer.get();
    ISOBIT_ASSERT_OK(joined);
    receiver_ = *std::move(joined);
  }
  static absl::Status NoCheck() { return absl::OkStatus(); }

  std::string id_;
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<WeightBroadcast> receiver_;
};

TEST_F(NcclBroadcastTest, EveryByteArrives) {
  Meet();
  const struct {
    size_t bytes;
    ncclDataType_t type;
    size_t size_of_type;
  } kBroadcasts[] = {{1, ncclUint8, 1},
                     {4098, ncclBfloat16, 2},
                     {4096, ncclFloat, 4},
                     {3'000'001, ncclUint8, 1},
                     {200'000'002, ncclBfloat16, 2}};
  int round = 0;
  for (const auto& one : kBroadcasts) {
    const std::vector<uint8_t> sent = Pattern(one.bytes, ++round);
    auto sends = std::async(std::launch::async,
                            [&] { trainer_->Broadcast(sent, one.type, one.size_of_type); });
    ISOBIT_ASSERT_OK(receiver_->Reserve(one.bytes));
    ISOBIT_ASSERT_OK(receiver_->Begin(one.bytes, seconds(60), NoCheck));
    std::vector<uint8_t> received(one.bytes);
    const size_t half = one.bytes / 2;
    ISOBIT_ASSERT_OK(receiver_->Read(received.data(), half));
    ISOBIT_ASSERT_OK(receiver_->Read(received.data() + half, one.bytes - half));
    sends.get();
    EXPECT_TRUE(received == sent) << one.bytes << " bytes";
    if (round == 3) {
      ISOBIT_ASSERT_OK(receiver_->Reserve(0));
    }
  }
  ISOBIT_EXPECT_OK(receiver_->Reserve(0));
  EXPECT_THAT(receiver_->Reserve(size_t{1} << 50), StatusIs(StatusCode::kResourceExhausted));
}

TEST_F(NcclBroadcastTest, ATrainerThatDoesNotComeHoldsNobody) {
  EXPECT_THAT(Join(milliseconds(500)), StatusIs(StatusCode::kDeadlineExceeded));
  EXPECT_THAT(NcclBroadcastOn(kReceiver)({.id = "short"}, {}),
              StatusIs(StatusCode::kInvalidArgument));
}

TEST_F(NcclBroadcastTest, ASilentTrainerHoldsNobody) {
  Meet();
  ISOBIT_ASSERT_OK(receiver_->Reserve(1000));
  EXPECT_THAT(receiver_->Begin(1000, milliseconds(300), NoCheck),
              StatusIs(StatusCode::kDeadlineExceeded, testing::HasSubstr("silent for 300 ms")));
  receiver_ = nullptr;
}

TEST_F(NcclBroadcastTest, ACallerThatGoesEndsTheWait) {
  Meet();
  ISOBIT_ASSERT_OK(receiver_->Reserve(1000));
  int polls = 0;
  EXPECT_THAT(receiver_->Begin(1000, seconds(60),
                               [&]() -> absl::Status {
                                 if (++polls < 100) return absl::OkStatus();
                                 return absl::CancelledError("nobody waits");
                               }),
              StatusIs(StatusCode::kCancelled));
  receiver_ = nullptr;
}

TEST_F(NcclBroadcastTest, ATrainerThatGoesHoldsNobody) {
  Meet();
  ISOBIT_ASSERT_OK(receiver_->Reserve(1000));
  trainer_ = nullptr;
  EXPECT_FALSE(receiver_->Begin(1000, seconds(2), NoCheck).ok());
  receiver_ = nullptr;
}

}  // namespace
}  // namespace isobit
