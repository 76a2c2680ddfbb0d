// The forward pass over other lists of blocks than those of today's models: layers that differ, odd
// numbers of blocks, and blocks with a slot. Each must have the same bits on any number of ranks,
// in one step or many.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/round_up.h"
#include "common/parallel/thread_group.h"
#include "gmock/gmock.h"
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
#include "tests/support/running_sum.h"
#include "tests/support/status_matchers.h"
#include "tools/model_shapes.h"

namespace isobit {
namespace {

using testing_support::RunningSumOf;
using testing_support::StatusIs;

constexpr int32_t kPageSize = 4;
constexpr int64_t kRows = 11;  // of the sequence

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
      if (kind == 's') plan.Append<RunningSumOf<1>>(layer);
      if (kind == 't') plan.Append<RunningSumOf<4>>(layer);
    }
  }
  return plan;
}

// Rows of the one sequence, of which some may have been computed before.
struct Step {
  int64_t first;
  int64_t rows;
  int32_t from_slot;
  int32_t to_slot;
};

// All rows in steps of `step` tokens. The state stays in slot 1; nobody reads the last one.
std::vector<Step> StepsOf(int64_t step) {
  std::vector<Step> steps;
  for (int64_t row = 0; row < kRows; row += step) {
    const int64_t rows = std::min(step, kRows - row);
    steps.push_back({row, rows, row == 0 ? kNoSlot : 1, row + rows == kRows ? kNoSlot : 1});
  }
  return steps;
}

constexpr int64_t kWhole = std::numeric_limits<int64_t>::max();

// The hidden rows of the sequence on rank 0 of `size`, each of the last step that computed it.
// overlap_rows: see GatherAllReduce.
absl::StatusOr<std::vector<Bf16>> Forward(const ModelPlan& plan, int size,
                                          const std::vector<Step>& steps,
                                          int64_t overlap_rows = kWhole) {
  const auto width = static_cast<size_t>(plan.config.hidden_size);
  const testing_support::DrawnWeights source(plan);
  const contract::RopeTable rope = RopeTableOf(plan.config, kRows);
  std::vector<Bf16> result;
  absl::Status status;
  ThreadGroup group(size);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      const std::unique_ptr<Backend> ops = MakeCpuBackend({});
      const WeightLayout layout(plan, *ShapeOfRank(plan.config, r, size), ops->packer());
      const auto weights = *ResidentWeights::Create(layout, ops->device());
      ISOBIT_ASSERT_OK(weights->Commit(
          testing_support::PrepareBlocks(source, "", {weights.get()})->ranks.blocks.front()));
      GatherAllReduce all_reduce(*ops, group.rank(r), overlap_rows);
      const bool sums = size > 1 || overlap_rows < kWhole;
      Transformer transformer(layout, rope, *ops, sums ? &all_reduce : nullptr);
      const std::vector<int32_t> pages = {2, 0, 1};
      const KvCache cache =
          *KvCache::Create(plan, layout.shape(),
                           {.num_pages = 3, .page_size = kPageSize, .num_slots = 3}, ops->device());
      std::vector<Bf16> hidden(kRows * width);
      absl::Status done;
      for (const Step& step : steps) {
        Batch batch = {.ids = {},
                       .sequences = {{.first_row = 0,
                                      .num_rows = step.rows,
                                      .first_position = step.first,
                                      .pages = pages.data(),
                                      .from_slot = step.from_slot,
                                      .to_slot = step.to_slot}}};
        for (int64_t i = 0; i < step.rows; ++i) {
          batch.ids.push_back(static_cast<int32_t>(step.first + i) * 5);
        }
        done = transformer.Forward(batch, *weights, cache,
                                   hidden.data() + static_cast<size_t>(step.first) * width);
        if (!done.ok()) break;  // on every rank
      }
      if (r == 0) {
        result = hidden;
        status = done;
      }
      ISOBIT_EXPECT_OK(group.rank(r).Barrier());
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (!status.ok()) return status;
  return result;
}

std::vector<Bf16> Forward(const ModelPlan& plan, int size, int64_t step) {
  const absl::StatusOr<std::vector<Bf16>> hidden = Forward(plan, size, StepsOf(step));
  ISOBIT_EXPECT_OK(hidden);
  return hidden.ok() ? *hidden : std::vector<Bf16>();
}

TEST(BlockListTest, AnyListHasTheSameBitsOnAnyRanksAndSteps) {
  std::vector<std::vector<Bf16>> seen;
  for (const std::vector<std::string>& kinds :
       std::vector<std::vector<std::string>>{{"am", "am"},
                                             {"a", "am"},
                                             {"am", "m", "a"},
                                             {"mm", "a"},
                                             {"as", "am"},
                                             {"s", "s"},
                                             {"t", "am"},
                                             {"at", "s", "am"}}) {
    const ModelPlan plan = PlanWith(kinds);
    const std::vector<Bf16> expected = Forward(plan, 1, kRows);
    EXPECT_EQ(Forward(plan, 1, 1), expected);
    EXPECT_EQ(Forward(plan, 1, 3), expected);
    for (const int size : {2, 4}) {
      for (const int64_t step : {int64_t{1}, int64_t{3}, kRows}) {
        EXPECT_EQ(Forward(plan, size, step), expected) << size << " ranks, steps of " << step;
      }
    }
    EXPECT_EQ(std::ranges::find(seen, expected), seen.end()) << "another list, the same result";
    seen.push_back(expected);
  }
  // With several ranks a model has more than one block.
  const ModelPlan alone = PlanWith({"s"});
  EXPECT_EQ(Forward(alone, 1, 3), Forward(alone, 1, kRows));
}

// A step in halves passes the state from one to the other through the sequence's slot or kCutSlot.
TEST(BlockListTest, AStateGoesOnInTheOtherHalf) {
  for (const char* const first : {"s", "t"}) {
    const ModelPlan plan = PlanWith({first, "am"});
    const std::vector<Bf16> expected = Forward(plan, 1, kRows);
    for (const int size : {1, 2}) {
      for (const int64_t step : {int64_t{2}, int64_t{7}, kRows}) {
        const auto halves = Forward(plan, size, StepsOf(step), /*overlap_rows=*/2);
        ISOBIT_ASSERT_OK(halves);
        EXPECT_EQ(*halves, expected) << size << " ranks, steps of " << step;
      }
    }
  }
}

// The same slot may be read again and again.
TEST(BlockListTest, ASequenceGoesOnInAnotherSlotAndTheOldOneStays) {
  for (const char* const first : {"as", "t"}) {
    const ModelPlan plan = PlanWith({first, "am"});
    const std::vector<Bf16> expected = Forward(plan, 1, kRows);
    for (const int64_t overlap_rows : {kWhole, int64_t{2}}) {
      for (const std::vector<Step>& steps : std::vector<std::vector<Step>>{
               {{0, 5, kNoSlot, 1}, {5, 6, 1, 2}, {5, 6, 1, 3}},
               {{0, 5, kNoSlot, 1}, {5, 6, 1, 2}, {5, 6, 1, kNoSlot}},
               {{0, 5, kNoSlot, 1}, {5, 2, 1, 2}, {7, 4, 2, 3}, {5, 6, 1, 1}},
               {{0, 6, kNoSlot, 3}, {6, 2, 3, 1}, {6, 2, 3, 2}, {8, 3, 1, 1}, {8, 3, 2, 2}}}) {
        const auto hidden = Forward(plan, 1, steps, overlap_rows);
        ISOBIT_ASSERT_OK(hidden);
        EXPECT_EQ(*hidden, expected);
      }
    }
  }
}

TEST(BlockListTest, ASequenceReturnsToARowOfItsChunk) {
  const ModelPlan plan = PlanWith({"t", "am"});
  const std::vector<Bf16> expected = Forward(plan, 1, kRows);
  for (const std::vector<Step>& steps :
       std::vector<std::vector<Step>>{{{0, 6, kNoSlot, 1}, {5, 6, 1, 1}},
                                      {{0, 7, kNoSlot, 1}, {4, 2, 1, 1}, {5, 6, 1, kNoSlot}},
                                      {{0, 7, kNoSlot, 1}, {6, 5, 1, 2}, {5, 6, 1, 3}},
                                      {{0, 8, kNoSlot, 1}, {8, 2, 1, 1}, {8, 3, 1, 1}}}) {
    const auto hidden = Forward(plan, 1, steps);
    ISOBIT_ASSERT_OK(hidden);
    EXPECT_EQ(*hidden, expected);
  }
}

// Controls: the tests' own block finds a slot that does not hold what the sequence goes on from.
TEST(BlockListTest, ASlotOfAnotherRowIsFound) {
  struct Case {
    const char* first;
    std::vector<Step> steps;
  };
  for (const auto& [first, steps] :
       std::vector<Case>{{"s", {{0, 6, kNoSlot, 1}, {5, 6, 1, 1}}},  // no chunk
                         {"t", {{0, 9, kNoSlot, 1}, {7, 4, 1, 1}}},  // of an earlier chunk
                         {"t", {{0, 8, kNoSlot, 1}, {7, 4, 1, 1}}},  // likewise
                         {"t", {{0, 5, kNoSlot, 1}, {6, 5, 1, 1}}},  // not so far
                         {"s", {{0, 5, kNoSlot, 1}, {5, 6, 2, 2}}},  // never written
                         {"s", {{0, 5, kNoSlot, 1}, {5, 3, 1, 1}, {5, 6, 1, 2}}},   // has gone on
                         {"s", {{0, 5, kNoSlot, 1}, {5, 6, kNoSlot, kNoSlot}}}}) {  // from nothing
    EXPECT_THAT(Forward(PlanWith({first, "am"}), 1, steps), StatusIs(absl::StatusCode::kInternal));
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

TEST(BlockListTest, SlotsAreThoseOfTheBlocks) {
  const ModelPlan none = PlanWith({"am"}), one = PlanWith({"as", "am"}), two = PlanWith({"s", "s"}),
                  chunks = PlanWith({"t", "am"}), mixed = PlanWith({"s", "t"});
  const RankShape shape = *ShapeOfRank(one.config, 0, 1);
  EXPECT_EQ(SlotsOf(none, shape).bytes, 0u);
  EXPECT_EQ(SlotsOf(none, shape).rows, 0);
  const size_t of_sum = SlotsOf(one, shape).bytes;
  const size_t of_chunk = SlotsOf(chunks, shape).bytes;
  const auto intermediate = static_cast<size_t>(one.config.intermediate_size);
  EXPECT_GE(of_sum, intermediate * sizeof(float));
  EXPECT_GE(of_chunk, intermediate * (sizeof(float) + 3 * sizeof(Bf16)));
  EXPECT_EQ(of_sum % kSlotAlignment, 0u);
  EXPECT_EQ(of_chunk % kSlotAlignment, 0u);
  EXPECT_EQ(SlotsOf(two, shape).bytes, 2 * of_sum);
  EXPECT_EQ(SlotsOf(mixed, shape).bytes, of_sum + of_chunk);
  EXPECT_EQ(SlotsOf(one, shape).rows, 1);
  EXPECT_EQ(SlotsOf(chunks, shape).rows, 4);
  EXPECT_EQ(SlotsOf(mixed, shape).rows, 1) << "what holds for both";
  EXPECT_LT(SlotsOf(one, *ShapeOfRank(one.config, 0, 4)).bytes, of_sum) << "a rank's columns";
  EXPECT_EQ(KvCache::PageBytes(one, shape, kPageSize),
            KvCache::PageBytes(PlanWith({"a", "a"}), shape, kPageSize))
      << "a slot is no page";
}

// Each block has slots of its own, kCutSlot and those from 1 on, none of which lies in a page.
TEST(BlockListTest, SlotsAreApart) {
  const ModelPlan plan = PlanWith({"as", "t", "am"});
  const RankShape shape = *ShapeOfRank(plan.config, 0, 1);
  const std::unique_ptr<Backend> ops = MakeCpuBackend({});
  const CacheSize size = {.num_pages = 5, .page_size = 3, .num_slots = 6};
  const KvCache cache = *KvCache::Create(plan, shape, size, ops->device());
  const size_t pages = 5 * KvCache::PageBytes(plan, shape, 3);
  EXPECT_EQ(cache.bytes(), RoundUp(pages, kSlotAlignment) + 7 * SlotsOf(plan, shape).bytes);
  EXPECT_EQ(cache.size().num_slots, 6);
  const std::byte* const begin = cache.of_block(0).planes;
  std::vector<std::pair<const std::byte*, const std::byte*>> slots;
  for (size_t b = 0; b < plan.blocks.size(); ++b) {
    const size_t bytes = plan.blocks[b]->State(shape).slot_bytes;
    if (bytes == 0) continue;
    const BlockState state = cache.of_block(b);
    EXPECT_EQ(state.slot_stride % kSlotAlignment, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(state.slots) % kSlotAlignment, 0u);
    for (size_t slot = 0; slot <= 6; ++slot) {
      const std::byte* const at = state.slots + slot * state.slot_stride;
      EXPECT_GE(at, begin + pages);
      EXPECT_LE(at + bytes, begin + cache.bytes());
      slots.emplace_back(at, at + bytes);
    }
  }
  std::ranges::sort(slots);
  ASSERT_EQ(slots.size(), 2u * 7);
  for (size_t i = 1; i < slots.size(); ++i) EXPECT_LE(slots[i - 1].second, slots[i].first);

  CacheSize shared = size;
  shared.shared = true;
  const KvCache of_one = *KvCache::Create(plan, shape, shared, ops->device());
  EXPECT_EQ(of_one.of_block(1).slots, of_one.of_block(2).slots);
  EXPECT_LT(of_one.bytes(), cache.bytes());
  EXPECT_GE(of_one.bytes(), 7 * SlotsOf(PlanWith({"t"}), shape).bytes);
}

TEST(BlockListTest, SlotsTakeAtMostHalfOfTheMemory) {
  const ModelPlan plan = PlanWith({"at", "as"});
  const RankShape shape = *ShapeOfRank(plan.config, 0, 1);
  const CacheSize most = {.num_pages = 1000, .page_size = kPageSize, .num_slots = 50};
  const auto slot = static_cast<double>(SlotsOf(plan, shape).bytes);
  const auto page = static_cast<double>(KvCache::PageBytes(plan, shape, kPageSize));
  const auto fit = [&](double bytes) { return KvCache::Fit(plan, shape, most, bytes); };
  EXPECT_EQ(fit(1e12).num_slots, 50);
  EXPECT_EQ(fit(1e12).num_pages, 1000);
  EXPECT_EQ(fit(0).num_slots, 0);
  EXPECT_EQ(fit(0).num_pages, 0);
  EXPECT_EQ(fit(40 * slot).num_slots, 19) << "and kCutSlot";
  EXPECT_EQ(fit(40 * slot).num_pages, std::min(1000.0, std::floor(20 * slot / page)));
  EXPECT_EQ(fit(40 * slot).page_size, kPageSize);
  for (double bytes = 0; bytes < 200 * slot; bytes += 0.7 * slot) {
    const CacheSize size = fit(bytes);
    const double taken = size.num_pages * page + (size.num_slots + 1) * slot;
    EXPECT_TRUE(size.num_pages == 0 || taken <= bytes) << bytes;
  }
  // A model without slots takes pages alone.
  const ModelPlan plain = PlanWith({"am"});
  const double of_plain = static_cast<double>(KvCache::PageBytes(plain, shape, kPageSize));
  EXPECT_EQ(KvCache::Fit(plain, shape, most, 7.5 * of_plain).num_pages, 7);
}

}  // namespace
}  // namespace isobit
