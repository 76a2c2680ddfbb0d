// The forward pass over other lists of blocks than those of today's models: layers that differ, and
// odd numbers of blocks. Each must have the same bits on any number of ranks, in one step or many.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/parallel/thread_group.h"
#include "gtest/gtest.h"
#include "kernels/blocks/attention.h"
#include "kernels/blocks/gated_mlp.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gather_all_reduce.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/model_plan.h"
#include "kernels/model/numerics.h"
#include "kernels/model/resident_weights.h"
#include "kernels/model/transformer.h"
#include "tests/support/drawn_weights.h"
#include "tests/support/prepare_blocks.h"
#include "tests/support/status_matchers.h"
#include "tools/model_shapes.h"

namespace isobit {
namespace {

constexpr int32_t kPageSize = 4;

ModelPlan PlanWith(const std::vector<std::string>& kinds) {
  ModelPlan plan(*NamedModelShape("tiny-qwen3"));
  plan.blocks.clear();
  plan.parameters.erase(plan.parameters.begin() + 1, plan.parameters.end() - 1);
  plan.config.num_layers = static_cast<int>(kinds.size());
  for (int layer = 0; layer < plan.config.num_layers; ++layer) {
    // Each letter is a block of the layer.
    for (const char kind : kinds[static_cast<size_t>(layer)]) {
      if (kind == 'a') plan.Append<Attention>(layer);
      if (kind == 'm') plan.Append<GatedMlp>(layer);
    }
  }
  return plan;
}

// The hidden rows of kRows tokens on rank 0 of `size`, computed in steps of `step` tokens.
std::vector<Bf16> Forward(const ModelPlan& plan, int size, int64_t step) {
  constexpr int64_t kRows = 11;
  const auto width = static_cast<size_t>(plan.config.hidden_size);
  const testing_support::DrawnWeights source(plan);
  const contract::RopeTable rope = RopeTableOf(plan.config, kRows);
  std::vector<Bf16> result;
  ThreadGroup group(size);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      const std::unique_ptr<Backend> ops = MakeCpuBackend({});
      const WeightLayout layout(plan, *ShapeOfRank(plan.config, r, size), ops->packer());
      const auto weights = *ResidentWeights::Create(layout, ops->device());
      ISOBIT_ASSERT_OK(weights->Commit(
          testing_support::PrepareBlocks(source, "", {weights.get()})->ranks.blocks.front()));
      GatherAllReduce all_reduce(*ops, group.rank(r));
      Transformer transformer(layout, rope, *ops, size > 1 ? &all_reduce : nullptr);
      const std::vector<int32_t> pages = {2, 0, 1};
      const KvCache cache =
          *KvCache::Create(plan, layout.shape(), 3, kPageSize, /*shared=*/false, ops->device());
      std::vector<Bf16> hidden(kRows * width);
      for (int64_t row = 0; row < kRows; row += step) {
        const int64_t rows = std::min(step, kRows - row);
        Batch batch = {.ids = {}, .sequences = {{0, rows, row, pages.data()}}};
        for (int64_t i = 0; i < rows; ++i) batch.ids.push_back(static_cast<int32_t>(row + i) * 5);
        ISOBIT_ASSERT_OK(transformer.Forward(batch, *weights, cache,
                                             hidden.data() + static_cast<size_t>(row) * width));
      }
      if (r == 0) result = hidden;
      ISOBIT_EXPECT_OK(group.rank(r).Barrier());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return result;
}

TEST(BlockListTest, AnyListHasTheSameBitsOnAnyRanksAndSteps) {
  std::vector<std::vector<Bf16>> seen;
  for (const std::vector<std::string>& kinds : std::vector<std::vector<std::string>>{
           {"am", "am"}, {"a", "am"}, {"am", "m", "a"}, {"mm", "a"}}) {
    const ModelPlan plan = PlanWith(kinds);
    const std::vector<Bf16> expected = Forward(plan, 1, 11);
    EXPECT_EQ(Forward(plan, 1, 1), expected);
    for (const int size : {2, 4}) {
      EXPECT_EQ(Forward(plan, size, 11), expected) << size;
      EXPECT_EQ(Forward(plan, size, 3), expected) << size;
    }
    EXPECT_EQ(std::ranges::find(seen, expected), seen.end()) << "another list, the same result";
    seen.push_back(expected);
  }
}

// Blocks without state take no pages, and blocks that differ in it have pages of their own sizes.
TEST(BlockListTest, MemoryIsThatOfTheBlocks) {
  const ModelPlan two = PlanWith({"am", "am"}), one = PlanWith({"am", "m"}), none = PlanWith({"m"});
  const RankShape shape = *ShapeOfRank(two.config, 0, 1);
  EXPECT_GT(KvCache::PageBytes(one, shape, kPageSize), 0u);
  EXPECT_EQ(KvCache::PageBytes(two, shape, kPageSize),
            2 * KvCache::PageBytes(one, shape, kPageSize));
  EXPECT_EQ(KvCache::PageBytes(none, shape, kPageSize), 0u);
}

}  // namespace
}  // namespace isobit
