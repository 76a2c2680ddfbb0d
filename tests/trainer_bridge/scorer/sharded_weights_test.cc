// Shards: gathered blocks equal those that were cut, and never more than two are full at a time.
#include "trainer_bridge/scorer/sharded_weights.h"

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/validate_tensors.h"
#include "common/parallel/host_block_gather.h"
#include "common/parallel/thread_group.h"
#include "gtest/gtest.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/host_device.h"
#include "kernels/model/model_plan.h"
#include "kernels/model/pack_model.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/support/all_tensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using std::chrono::milliseconds;
using testing_support::StatusIs;

// A tiny model and a group of ranks that share its weights.
class ShardedWeightsTest : public testing::Test {
 protected:
  ShardedWeightsTest() : config_(testing_support::TinyConfig(Architecture::kQwen2)) {
    testing_support::WriteTinyModel(config_, 5, dir_.path());
  }

  void SetUp() override {
    ISOBIT_ASSERT_OK_AND_ASSIGN(const RankShape shape, ShapeOfRank(config_, 0, 1));
    layout_ = std::make_unique<WeightLayout>(config_, shape, ops_->packer());
    ISOBIT_ASSERT_OK_AND_ASSIGN(Checkpoint checkpoint, Checkpoint::Open(dir_.path()));
    ISOBIT_ASSERT_OK(ValidateTensors(ModelPlan(config_), checkpoint));
    tensors_ = testing_support::AllTensors(checkpoint);
    checkpoint_ = std::make_unique<Checkpoint>(std::move(checkpoint));
  }

  std::string Packed(int block) const {
    const size_t bytes = layout_->BlockBytes(block);
    const AlignedBytes memory = AllocateAligned(bytes);
    layout_->PackBlock(tensors_, block, memory.get());
    return std::string(reinterpret_cast<const char*>(memory.get()), bytes);
  }

  std::vector<RankShards> Cut(int num_ranks, int first_rank, int count) const {
    std::vector<std::unique_ptr<Device>> devices;
    for (int rank = 0; rank < count; ++rank) devices.push_back(std::make_unique<HostDevice>());
    ShardedStore store(*layout_, num_ranks, first_rank, devices);
    const absl::StatusOr<std::string> digest = PackModel(*checkpoint_, "", store);
    EXPECT_THAT(digest, testing_support::IsOk());
    EXPECT_EQ(*digest, DigestTensors(*checkpoint_)->checkpoint);
    return store.Take();
  }

  // Runs `body` on one thread for each rank.
  template <class Body>
  void OnRanks(int num_ranks, const Body& body) {
    ThreadGroup group(num_ranks);
    const std::vector<RankShards> shards = Cut(num_ranks, 0, num_ranks);
    const size_t block_bytes = GatheredBytes(*layout_, num_ranks);
    std::vector<std::unique_ptr<FullBlocks>> full;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
      full.push_back(std::make_unique<FullBlocks>(
          std::make_unique<HostBlockGather>(group.rank(rank), block_bytes)));
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto r = static_cast<size_t>(rank);
        body(rank, shards[r], *full[r]);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const testing_support::TempDir dir_;
  const ModelConfig config_;
  const std::unique_ptr<Backend> ops_ = MakeOracleBackend();
  std::unique_ptr<WeightLayout> layout_;
  std::unique_ptr<Checkpoint> checkpoint_;
  TensorSet tensors_;
};

TEST_F(ShardedWeightsTest, ShardsAreEqualAndHoldEachByteOnce) {
  for (const int num_ranks : {1, 2, 3, 4, 8}) {
    const std::vector<RankShards> ranks = Cut(num_ranks, 0, num_ranks);
    for (int block = 0; block < layout_->num_blocks(); ++block) {
      std::string joined;
      for (const RankShards& rank : ranks) {
        EXPECT_EQ(rank.shard_bytes(block), ranks[0].shard_bytes(block));
        joined.append(reinterpret_cast<const char*>(rank.shard(block)), rank.shard_bytes(block));
      }
      const std::string packed = Packed(block);
      ASSERT_GE(joined.size(), packed.size());
      EXPECT_LT(joined.size() - packed.size(), static_cast<size_t>(256 * num_ranks));
      EXPECT_EQ(joined.substr(0, packed.size()), packed);
      EXPECT_EQ(joined.find_first_not_of('\0', packed.size()), std::string::npos);
    }
  }
}

TEST_F(ShardedWeightsTest, EveryRankGathersWhatWasPacked) {
  for (const int num_ranks : {1, 2, 3, 4, 8}) {
    OnRanks(num_ranks, [&](int rank, const RankShards& shards, FullBlocks& full) {
      for (int pass = 0; pass < 3; ++pass) {
        GatheredPass weights(shards, full);
        if (rank == 1) continue;  // has nothing to compute
        for (int block = 0; block < layout_->num_blocks(); ++block) {
          const bool is_last = block == layout_->num_blocks() - 1;
          for (int again = 0; again < (is_last ? 2 : 1); ++again) {
            const absl::StatusOr<const std::byte*> bytes = weights.Acquire(block);
            ISOBIT_ASSERT_OK(bytes);
            const std::string expected = Packed(block);
            EXPECT_EQ(std::memcmp(*bytes, expected.data(), expected.size()), 0)
                << "block " << block << " on rank " << rank << " of " << num_ranks;
            weights.Release(block);
          }
        }
      }
    });
  }
}

TEST_F(ShardedWeightsTest, AtMostTwoFullBlocksAreResident) {
  OnRanks(3, [&](int rank, const RankShards& shards, FullBlocks& full) {
    {
      GatheredPass weights(shards, full);
      for (int block = 0; block < layout_->num_blocks(); ++block) {
        ISOBIT_ASSERT_OK(weights.Acquire(block));
        EXPECT_LE(full.resident(), 2);
        std::this_thread::sleep_for(milliseconds(3 * rank));  // the ranks drift apart
        EXPECT_LE(full.resident(), 2);
        weights.Release(block);
      }
    }
    EXPECT_EQ(full.resident(), 0);
    EXPECT_LE(full.peak(), 2);
  });
}

// Watches the order in which a pass asks for gathers.
class RecordingGather final : public BlockGather {
 public:
  explicit RecordingGather(std::string& calls) : calls_(calls) {}

  absl::Status Start(int place, const std::byte* /*shard*/, size_t /*bytes*/) override {
    return Record("start", place);
  }
  absl::StatusOr<const std::byte*> Use(int place) override {
    ISOBIT_RETURN_IF_ERROR(Record("use", place));
    return nullptr;
  }
  absl::Status Release(int place) override { return Record("release", place); }
  absl::Status WaitForArrival() override { return absl::OkStatus(); }
  absl::Status Finish() override {
    calls_ += " finish";
    return absl::OkStatus();
  }
  std::chrono::microseconds busy() const override { return {}; }
  void Abort(const absl::Status& /*reason*/) override {}

 private:
  absl::Status Record(const char* what, int place) {
    calls_ += absl::StrCat(calls_.empty() ? "" : " ", what, place);
    return absl::OkStatus();
  }
  std::string& calls_;
};

TEST_F(ShardedWeightsTest, TheNextBlockComesWhileThePresentOneIsUsed) {
  const std::vector<RankShards> shards = Cut(2, 0, 1);
  std::string calls;
  FullBlocks full(std::make_unique<RecordingGather>(calls));
  {
    GatheredPass weights(shards[0], full);
    for (int block = 0; block < 3; ++block) {
      ISOBIT_ASSERT_OK(weights.Acquire(block));
      if (block < 2) weights.Release(block);
    }
    EXPECT_EQ(calls, "start0 start1 use0 release0 start0 use1 release1 start1 use0");
    EXPECT_EQ(full.resident(), 2);
    EXPECT_EQ(layout_->num_blocks(), 6);
    ISOBIT_ASSERT_OK(weights.Finish());
  }
  EXPECT_EQ(calls,
            "start0 start1 use0 release0 start0 use1 release1 start1 use0 release0 start0 release1 "
            "start1 release0 release1 finish");
}

TEST_F(ShardedWeightsTest, TwoBlocksMayBeHeldAtOneTime) {
  const std::vector<RankShards> shards = Cut(2, 0, 1);
  std::string calls;
  FullBlocks full(std::make_unique<RecordingGather>(calls));
  GatheredPass weights(shards[0], full);
  ISOBIT_ASSERT_OK(weights.Acquire(0));
  ISOBIT_ASSERT_OK(weights.Acquire(1));
  EXPECT_EQ(calls, "start0 start1 use0 use1");  // neither place is taken for block 2
  weights.Release(0);
  ISOBIT_ASSERT_OK(weights.Acquire(2));
  EXPECT_EQ(calls, "start0 start1 use0 use1 release0 start0 use0");
  weights.Release(1);
  EXPECT_EQ(calls, "start0 start1 use0 use1 release0 start0 use0 release1 start1");
}

TEST_F(ShardedWeightsTest, ARanksShardsDoNotDependOnWhoElseIsInItsProcess) {
  const std::vector<RankShards> all = Cut(4, 0, 4);
  const std::vector<RankShards> some = Cut(4, 2, 2);
  for (size_t r = 0; r < some.size(); ++r) {
    for (int block = 0; block < layout_->num_blocks(); ++block) {
      EXPECT_EQ(
          std::memcmp(some[r].shard(block), all[2 + r].shard(block), all[2 + r].shard_bytes(block)),
          0);
    }
  }
}

TEST_F(ShardedWeightsTest, OneRanksShardsAreTheBlocks) {
  const std::vector<RankShards> shards = Cut(1, 0, 1);
  FullBlocks full(nullptr);
  GatheredPass weights(shards[0], full);
  for (int block = 0; block < layout_->num_blocks(); ++block) {
    ISOBIT_ASSERT_OK_AND_ASSIGN(const std::byte* bytes, weights.Acquire(block));
    EXPECT_EQ(bytes, shards[0].shard(block));
  }
  ISOBIT_EXPECT_OK(weights.Finish());
  EXPECT_EQ(full.peak(), 0);
}

TEST_F(ShardedWeightsTest, APassMayBeGivenUpAtAnyBlock) {
  OnRanks(2, [&](int rank, const RankShards& shards, FullBlocks& full) {
    for (int stop = 0; stop < layout_->num_blocks(); ++stop) {
      GatheredPass weights(shards, full);
      const int last = rank == 0 ? stop : layout_->num_blocks() - 1 - stop;
      for (int block = 0; block <= last; ++block) {
        ISOBIT_ASSERT_OK(weights.Acquire(block));
        if (block < last) weights.Release(block);
      }
    }
    EXPECT_EQ(full.resident(), 0);
  });
}

TEST_F(ShardedWeightsTest, AnAbortedGroupFailsEveryRank) {
  OnRanks(2, [&](int rank, const RankShards& shards, FullBlocks& full) {
    GatheredPass weights(shards, full);
    ISOBIT_ASSERT_OK(weights.Acquire(0));
    if (rank == 0) {
      full.Abort(absl::InternalError("device lost"));
      return;
    }
    absl::Status status;
    for (int block = 1; block < layout_->num_blocks() && status.ok(); ++block) {
      weights.Release(block - 1);
      status = weights.Acquire(block).status();
    }
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInternal, testing::HasSubstr("device lost")));
  });
}

}  // namespace
}  // namespace isobit
