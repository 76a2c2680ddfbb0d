// NCCL groups of ranks that are threads of this process, one GPU each: what arrives, in the order
// of the streams, and that a missing or aborted rank blocks nobody.
#include "common/parallel/nccl_group.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "common/parallel/nccl_block_gather.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using std::chrono::milliseconds;
using testing_support::StatusIs;

int NumDevices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// The sizes of groups that this machine has GPUs for.
std::vector<int> Sizes() {
  std::vector<int> sizes;
  for (const int size : {1, 2, 4, 8}) {
    if (size <= NumDevices()) sizes.push_back(size);
  }
  return sizes;
}

// Runs `body` on one thread a rank, each with a group on its own GPU.
void OnRanks(int size, const std::function<void(NcclGroup&, cudaStream_t)>& body) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::string id, NewNcclId());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto group = NcclGroup::Create({.id = id, .rank = rank, .size = size, .device = rank});
      ISOBIT_ASSERT_OK(group);
      cudaStream_t stream = nullptr;
      ASSERT_EQ(cudaSetDevice(rank), cudaSuccess);
      ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      body(**group, stream);
      EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

uint8_t Pattern(int rank, int round, size_t i) {
  return static_cast<uint8_t>(i * 7 + i / 251 + static_cast<size_t>(rank) * 31 +
                              static_cast<size_t>(round) * 57 + 1);
}

class NcclGroupTest : public testing::Test {
 protected:
  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "SKIPPED, no GPU";
  }
};

// From plain memory into plain memory (kernels), and within the group's (copy engines where GPUs
// are peers): the same bytes.
TEST_F(NcclGroupTest, EveryRankGetsEveryRanksBytes) {
  for (const int size : Sizes()) {
    for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{3'000'001}}) {
      OnRanks(size, [&](NcclGroup& group, cudaStream_t stream) {
        const auto ranks = static_cast<size_t>(size);
        ISOBIT_ASSERT_OK_AND_ASSIGN(const NcclMemory shared, group.Allocate(ranks * bytes));
        void* plain = nullptr;
        void* sent = nullptr;
        ASSERT_EQ(cudaMalloc(&plain, ranks * bytes), cudaSuccess);
        ASSERT_EQ(cudaMalloc(&sent, bytes), cudaSuccess);
        for (int round = 0; round < 3; ++round) {
          std::vector<uint8_t> mine(bytes);
          for (size_t i = 0; i < bytes; ++i) mine[i] = Pattern(group.rank(), round, i);
          std::byte* const own = shared.get() + static_cast<size_t>(group.rank()) * bytes;
          // On the stream: cudaMemcpy from pageable memory may return before the bytes are there,
          // and this stream does not wait for the one that it uses.
          ASSERT_EQ(cudaMemcpyAsync(sent, mine.data(), bytes, cudaMemcpyDefault, stream),
                    cudaSuccess);
          ASSERT_EQ(cudaMemcpyAsync(own, sent, bytes, cudaMemcpyDefault, stream), cudaSuccess);
          ISOBIT_ASSERT_OK(group.AllGather(own, shared.get(), bytes, stream));
          ISOBIT_ASSERT_OK(group.AllGather(sent, plain, bytes, stream));
          std::vector<uint8_t> in_shared(ranks * bytes);
          std::vector<uint8_t> in_plain(ranks * bytes);
          ASSERT_EQ(cudaMemcpyAsync(in_shared.data(), shared.get(), ranks * bytes,
                                    cudaMemcpyDefault, stream),
                    cudaSuccess);
          ASSERT_EQ(
              cudaMemcpyAsync(in_plain.data(), plain, ranks * bytes, cudaMemcpyDefault, stream),
              cudaSuccess);
          ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
          ISOBIT_EXPECT_OK(group.Check());
          int64_t wrong = 0;
          for (size_t i = 0; i < ranks * bytes; ++i) {
            const uint8_t expected = Pattern(static_cast<int>(i / bytes), round, i % bytes);
            wrong += (in_shared[i] != expected) + (in_plain[i] != expected);
          }
          EXPECT_EQ(wrong, 0) << size << " ranks, " << bytes << " bytes, round " << round;
        }
        EXPECT_EQ(cudaFree(plain), cudaSuccess);
        EXPECT_EQ(cudaFree(sent), cudaSuccess);
      });
    }
  }
}

TEST_F(NcclGroupTest, SumsOfSmallIntegersAreExact) {
  for (const int size : Sizes()) {
    OnRanks(size, [&](NcclGroup& group, cudaStream_t stream) {
      constexpr size_t kCount = 10'000;
      const auto bf16 = [](int value) {
        const float x = static_cast<float>(value);
        uint32_t bits = 0;
        std::memcpy(&bits, &x, sizeof(bits));
        return static_cast<uint16_t>(bits >> 16);  // exact below 2^8
      };
      std::vector<uint16_t> values(kCount);
      for (size_t i = 0; i < kCount; ++i) values[i] = bf16(static_cast<int>(i % 16) + group.rank());
      void* memory = nullptr;
      const size_t bytes = kCount * sizeof(uint16_t);
      ASSERT_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
      ASSERT_EQ(cudaMemcpy(memory, values.data(), bytes, cudaMemcpyDefault), cudaSuccess);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // as above
      ISOBIT_ASSERT_OK(group.Run("ncclAllReduce", [&](ncclComm* comm) {
        return ncclAllReduce(memory, memory, kCount, ncclBfloat16, ncclSum, comm, stream);
      }));
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      ASSERT_EQ(cudaMemcpy(values.data(), memory, bytes, cudaMemcpyDefault), cudaSuccess);
      int64_t wrong = 0;
      for (size_t i = 0; i < kCount; ++i) {
        wrong += values[i] != bf16(size * static_cast<int>(i % 16) + size * (size - 1) / 2);
      }
      EXPECT_EQ(wrong, 0) << size << " ranks";
      EXPECT_EQ(cudaFree(memory), cudaSuccess);
    });
  }
}

// A chain of blocks through the two buffers, read by a stream that is slower than the gathers: none
// is overwritten before it was read.
TEST_F(NcclGroupTest, BlocksArriveAheadOfTheOpsAndWaitForThem) {
  for (const int size : Sizes()) {
    ISOBIT_ASSERT_OK_AND_ASSIGN(const std::string id, NewNcclId());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        constexpr size_t kBytes = 1 << 20;
        constexpr int kBlocks = 12;
        const auto ranks = static_cast<size_t>(size);
        ASSERT_EQ(cudaSetDevice(rank), cudaSuccess);
        cudaStream_t ops = nullptr;
        ASSERT_EQ(cudaStreamCreateWithFlags(&ops, cudaStreamNonBlocking), cudaSuccess);
        auto group = NcclGroup::Create({.id = id, .rank = rank, .size = size, .device = rank});
        ISOBIT_ASSERT_OK(group);
        ISOBIT_ASSERT_OK_AND_ASSIGN(
            const std::unique_ptr<BlockGather> gather,
            MakeNcclBlockGather(*std::move(group), ranks * kBytes, ops, milliseconds(30'000)));
        void* shards = nullptr;
        void* read = nullptr;
        ASSERT_EQ(cudaMalloc(&shards, kBlocks * kBytes), cudaSuccess);
        ASSERT_EQ(cudaMalloc(&read, kBlocks * ranks * kBytes), cudaSuccess);
        std::vector<uint8_t> mine(kBlocks * kBytes);
        for (size_t i = 0; i < mine.size(); ++i) {
          mine[i] = Pattern(rank, static_cast<int>(i / kBytes), i % kBytes);
        }
        ASSERT_EQ(cudaMemcpy(shards, mine.data(), mine.size(), cudaMemcpyDefault), cudaSuccess);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // as above
        for (int pass = 0; pass < 3; ++pass) {
          const auto start = [&](int block) {
            return gather->Start(
                block % 2, static_cast<std::byte*>(shards) + static_cast<size_t>(block) * kBytes,
                kBytes);
          };
          ISOBIT_ASSERT_OK(start(0));
          for (int block = 0; block < kBlocks; ++block) {
            if (block > 0) {
              ISOBIT_ASSERT_OK(gather->Release((block - 1) % 2));
            }
            if (block + 1 < kBlocks) {
              ISOBIT_ASSERT_OK(start(block + 1));
            }
            ISOBIT_ASSERT_OK_AND_ASSIGN(const std::byte* bytes, gather->Use(block % 2));
            // Many small reads are slower than one gather.
            for (size_t piece = 0; piece < 64; ++piece) {
              const size_t size_of_piece = ranks * kBytes / 64;
              ASSERT_EQ(cudaMemcpyAsync(
                            static_cast<std::byte*>(read) +
                                static_cast<size_t>(block) * ranks * kBytes + piece * size_of_piece,
                            bytes + piece * size_of_piece, size_of_piece, cudaMemcpyDefault, ops),
                        cudaSuccess);
            }
          }
          ISOBIT_ASSERT_OK(gather->Release((kBlocks - 1) % 2));
          ISOBIT_ASSERT_OK(gather->Finish());
          EXPECT_GT(gather->busy().count(), 0);
          ASSERT_EQ(cudaStreamSynchronize(ops), cudaSuccess);
          std::vector<uint8_t> received(kBlocks * ranks * kBytes);
          ASSERT_EQ(cudaMemcpy(received.data(), read, received.size(), cudaMemcpyDefault),
                    cudaSuccess);
          int64_t wrong = 0;
          for (size_t i = 0; i < received.size(); ++i) {
            wrong += received[i] != Pattern(static_cast<int>(i / kBytes % ranks),
                                            static_cast<int>(i / kBytes / ranks), i % kBytes);
          }
          EXPECT_EQ(wrong, 0) << "pass " << pass << " of rank " << rank << " of " << size;
        }
        EXPECT_EQ(cudaFree(shards), cudaSuccess);
        EXPECT_EQ(cudaFree(read), cudaSuccess);
        EXPECT_EQ(cudaStreamDestroy(ops), cudaSuccess);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_F(NcclGroupTest, AMissingRankIsToldInTime) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::string id, NewNcclId());
  const auto start = std::chrono::steady_clock::now();
  const auto group = NcclGroup::Create(
      {.id = id, .rank = 0, .size = 2, .device = 0, .timeout = milliseconds(2000)});
  EXPECT_THAT(group.status(),
              StatusIs(absl::StatusCode::kDeadlineExceeded, testing::HasSubstr("rank 0")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

// Rank 1 never sends; rank 0 learns so at its deadline, and from Abort at once.
TEST_F(NcclGroupTest, ARankThatDoesNotSendIsToldInTime) {
  if (NumDevices() < 2) GTEST_SKIP() << "SKIPPED, one GPU";
  OnRanks(2, [](NcclGroup& group, cudaStream_t stream) {
    if (group.rank() == 1) return;
    void* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, 2 << 20), cudaSuccess);
    ISOBIT_ASSERT_OK(group.AllGather(memory, memory, 1 << 20, stream));
    std::this_thread::sleep_for(milliseconds(200));
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    group.Abort(absl::InternalError("rank 1 is lost"));
    EXPECT_THAT(group.Check(), StatusIs(absl::StatusCode::kInternal, "rank 1 is lost"));
    EXPECT_THAT(group.AllGather(memory, memory, 1 << 20, stream),
                StatusIs(absl::StatusCode::kInternal, "rank 1 is lost"));
    // NCCL has the kernel give up.
    for (int i = 0; i < 1000 && cudaStreamQuery(stream) == cudaErrorNotReady; ++i) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
  });
}

}  // namespace
}  // namespace isobit
