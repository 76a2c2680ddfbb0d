// A forward pass over gathered weights, in two halves: while one layer is computed, the next block
// is already held, for its norm.
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/parallel/host_block_gather.h"
#include "common/parallel/thread_group.h"
#include "gtest/gtest.h"
#include "kernels/gather_all_reduce.h"
#include "kernels/host_device.h"
#include "kernels/model/numerics.h"
#include "kernels/model/pack_model.h"
#include "kernels/model/transformer.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "trainer_bridge/scorer/sharded_weights.h"

namespace isobit {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kRows = 24;
constexpr int32_t kPageSize = 8;

class ShardedForwardTest : public testing::Test {
 protected:
  ShardedForwardTest() : config_(testing_support::TinyConfig(Architecture::kQwen3)) {
    config_.num_layers = 5;
    testing_support::WriteTinyModel(config_, 1, dir_.File("model"));
    const auto checkpoint = *Checkpoint::Open(dir_.File("model"));
    const WeightLayout layout = Layout();
    std::vector<std::unique_ptr<Device>> devices;
    for (int rank = 0; rank < kRanks; ++rank) devices.push_back(std::make_unique<HostDevice>());
    ShardedStore store(layout, kRanks, 0, devices);
    ISOBIT_EXPECT_OK(PackModel(checkpoint, "", store));
    shards_ = store.Take();
  }

  WeightLayout Layout() const {
    return WeightLayout(config_, *ShapeOfRank(config_, 0, 1), ops_->packer());
  }

  // The result of every rank; all ranks have the same rows. overlap_rows: see GatherAllReduce.
  std::vector<std::vector<Bf16>> Forward(int64_t overlap_rows) const {
    ThreadGroup group(kRanks);
    const size_t bytes = GatheredBytes(Layout(), kRanks);
    std::vector<std::vector<Bf16>> hidden(kRanks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto r = static_cast<size_t>(rank);
        FullBlocks full(std::make_unique<HostBlockGather>(group.rank(rank), bytes));
        GatheredPass pass(shards_[r], full);
        hidden[r] = ForwardOf(pass, overlap_rows);
        ISOBIT_EXPECT_OK(pass.Finish());
        EXPECT_LE(full.peak(), BlockGather::kBuffers);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return hidden;
  }

  std::vector<Bf16> ForwardOf(WeightSource& weights, int64_t overlap_rows) const {
    const std::unique_ptr<Backend> ops = MakeOracleBackend();
    const WeightLayout layout = Layout();
    const contract::RopeTable rope = RopeTableOf(config_, kRows);
    ThreadGroup alone(1);
    GatherAllReduce all_reduce(*ops, alone.rank(0), overlap_rows);
    Transformer transformer(layout, rope, *ops, &all_reduce);
    const KvCache cache = *KvCache::Create(
        config_, layout.shape(),
        {.num_pages = kRows / kPageSize, .page_size = kPageSize, .shared = true}, ops->device());
    const int32_t pages[] = {0, 1, 2};
    Batch batch;
    for (int64_t row = 0; row < kRows; ++row) batch.ids.push_back(static_cast<int32_t>(row % 7));
    batch.sequences = {{.num_rows = kRows, .pages = pages}};
    std::vector<Bf16> hidden(static_cast<size_t>(kRows * config_.hidden_size));
    ISOBIT_EXPECT_OK(transformer.Forward(batch, weights, cache, hidden.data()));
    return hidden;
  }

  const testing_support::TempDir dir_;
  ModelConfig config_;
  const std::unique_ptr<Backend> ops_ = MakeOracleBackend();
  std::vector<RankShards> shards_;
};

TEST_F(ShardedForwardTest, AHeldBlockKeepsItsBytes) {
  const std::vector<std::vector<Bf16>> whole = Forward(kRows + 1);
  EXPECT_EQ(whole[0], whole[1]);
  for (int time = 0; time < 3; ++time) EXPECT_EQ(Forward(1), whole);
}

}  // namespace
}  // namespace isobit
