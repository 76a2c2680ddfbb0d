// Shards: what comes together is what was cut, never more than two full blocks of it at a time.
#include "trainer_bridge/scorer/sharded_weights.h"

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "common/checkpoint/tensor_names.h"
#include "common/parallel/thread_group.h"
#include "gtest/gtest.h"
#include "kernels/model/rank_shape.h"
#include "kernels/oracle/oracle_ops.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace isobit::scorer {
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
    layout_ = std::make_unique<WeightLayout>(config_, shape, *ops_);
    ISOBIT_ASSERT_OK_AND_ASSIGN(Checkpoint checkpoint, Checkpoint::Open(dir_.path()));
    ISOBIT_ASSERT_OK(ValidateCheckpoint(config_, checkpoint));
    checkpoint_ = std::make_unique<Checkpoint>(std::move(checkpoint));
  }

  std::string Packed(int block) const {
    const size_t bytes = layout_->BlockBytes(block);
    const AlignedBytes memory = AllocateAligned(bytes);
    layout_->PackBlock(*checkpoint_, *ops_, block, memory.get());
    return std::string(reinterpret_cast<const char*>(memory.get()), bytes);
  }

  // Runs `body` on one thread a rank.
  template <class Body>
  void OnRanks(int num_ranks, const Body& body) {
    ThreadGroup group(num_ranks);
    const std::vector<RankShards> shards = CutIntoShards(*layout_, *checkpoint_, *ops_, num_ranks);
    std::vector<std::unique_ptr<FullBlocks>> full;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
      full.push_back(std::make_unique<FullBlocks>(*layout_, num_ranks));
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto r = static_cast<size_t>(rank);
        body(rank, shards[r], group.rank(rank), *full[r]);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const testing_support::TempDir dir_;
  const ModelConfig config_;
  const std::unique_ptr<Ops> ops_ = MakeOracleOps();
  std::unique_ptr<WeightLayout> layout_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

TEST_F(ShardedWeightsTest, ShardsAreEqualAndHoldEachByteOnce) {
  for (const int num_ranks : {1, 2, 3, 4, 8}) {
    const std::vector<RankShards> ranks = CutIntoShards(*layout_, *checkpoint_, *ops_, num_ranks);
    for (int block = 0; block < layout_->num_blocks(); ++block) {
      std::string joined;
      for (const RankShards& rank : ranks) {
        EXPECT_EQ(rank.shard_bytes(block), ranks[0].shard_bytes(block));
        joined.append(reinterpret_cast<const char*>(rank.shard(block)), rank.shard_bytes(block));
      }
      const std::string packed = Packed(block);
      ASSERT_GE(joined.size(), packed.size());
      EXPECT_LT(joined.size() - packed.size(), static_cast<size_t>(64 * num_ranks));
      EXPECT_EQ(joined.substr(0, packed.size()), packed);
      EXPECT_EQ(joined.find_first_not_of('\0', packed.size()), std::string::npos);
    }
  }
}

TEST_F(ShardedWeightsTest, EveryRankGathersWhatWasPacked) {
  for (const int num_ranks : {1, 2, 3, 4, 8}) {
    OnRanks(num_ranks,
            [&](int rank, const RankShards& shards, Communicator& comm, FullBlocks& full) {
              for (int pass = 0; pass < 3; ++pass) {
                GatheredPass weights(shards, comm, full);
                if (rank == 1) continue;  // has nothing to compute
                for (int block = 0; block < layout_->num_blocks(); ++block) {
                  for (int again = 0; again < 2; ++again) {
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
  OnRanks(3, [&](int rank, const RankShards& shards, Communicator& comm, FullBlocks& full) {
    {
      GatheredPass weights(shards, comm, full);
      for (int block = 0; block < layout_->num_blocks(); ++block) {
        ISOBIT_ASSERT_OK(weights.Acquire(block));
        EXPECT_LE(full.resident(), 2);
        std::this_thread::sleep_for(milliseconds(3 * rank));  // the ranks drift apart
        EXPECT_LE(full.resident(), 2);
      }
    }
    EXPECT_EQ(full.resident(), 0);
    EXPECT_LE(full.peak(), 2);
  });
}

TEST_F(ShardedWeightsTest, TheNextBlockComesWhileThePresentOneIsUsed) {
  OnRanks(2, [&](int, const RankShards& shards, Communicator& comm, FullBlocks& full) {
    GatheredPass weights(shards, comm, full);
    ISOBIT_ASSERT_OK(weights.Acquire(0));
    for (int i = 0; i < 2000 && full.resident() < 2; ++i) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    EXPECT_EQ(full.resident(), 2);
    EXPECT_EQ(full.peak(), 2);
  });
}

TEST_F(ShardedWeightsTest, APassMayBeGivenUpAtAnyBlock) {
  OnRanks(2, [&](int rank, const RankShards& shards, Communicator& comm, FullBlocks& full) {
    for (int stop = 0; stop < layout_->num_blocks(); ++stop) {
      GatheredPass weights(shards, comm, full);
      const int last = rank == 0 ? stop : layout_->num_blocks() - 1 - stop;
      for (int block = 0; block <= last; ++block) ISOBIT_ASSERT_OK(weights.Acquire(block));
    }
    EXPECT_EQ(full.resident(), 0);
  });
}

TEST_F(ShardedWeightsTest, AnAbortedGroupFailsEveryRank) {
  OnRanks(2, [&](int rank, const RankShards& shards, Communicator& comm, FullBlocks& full) {
    GatheredPass weights(shards, comm, full);
    ISOBIT_ASSERT_OK(weights.Acquire(0));
    if (rank == 0) {
      comm.Abort(absl::InternalError("device lost"));
      return;
    }
    absl::Status status;
    for (int block = 1; block < layout_->num_blocks() && status.ok(); ++block) {
      status = weights.Acquire(block).status();
    }
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInternal, testing::HasSubstr("device lost")));
  });
}

}  // namespace
}  // namespace isobit::scorer
