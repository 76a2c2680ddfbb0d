// Every plan is a nearly even partition into whole units, and at every tensor-parallel size each
// rank owns a whole subtree of it.
#include "kernels/contract/leaf_plan.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "gtest/gtest.h"

namespace isobit::contract {
namespace {

void ExpectPartition(const LeafPlan& plan, int64_t total, int64_t unit) {
  EXPECT_EQ(plan.bounds.front(), 0);
  EXPECT_EQ(plan.bounds.back(), total);
  int64_t fewest = total;
  int64_t most = 0;
  for (size_t l = 0; l < kLeaves; ++l) {
    const int64_t columns = plan.bounds[l + 1] - plan.bounds[l];
    EXPECT_GE(columns, 0);
    EXPECT_TRUE(plan.bounds[l] == total || plan.bounds[l] % unit == 0) << l;
    const int64_t units = (columns + unit - 1) / unit;
    fewest = std::min(fewest, units);
    most = std::max(most, units);
  }
  EXPECT_LE(most - fewest, 1);
}

TEST(LeafPlanTest, PartitionsAnyWidth) {
  for (int64_t columns = 0; columns < 700; ++columns) {
    SCOPED_TRACE(columns);
    ExpectPartition(PlanColumns(columns), columns, kLeafUnit);
  }
  for (const int64_t columns : {2048, 4096, 12288, 49152, 151936}) {
    ExpectPartition(PlanColumns(columns), columns, kLeafUnit);
  }
}

TEST(LeafPlanTest, PartitionsAnyKvHeads) {
  for (int64_t kv_heads = 1; kv_heads <= 64; ++kv_heads) {
    for (const int64_t columns : {1, 48, 192, 1024}) {
      ExpectPartition(PlanKvHeads(kv_heads, columns), kv_heads * columns, columns);
    }
  }
}

// SmolLM2-135M: nine query heads, three for each KV head, which makes units of 192 columns.
TEST(LeafPlanTest, NineHeadsOfThreeKvHeadsOnFourRanks) {
  const LeafPlan plan = PlanKvHeads(3, 192);
  EXPECT_EQ(plan.bounds, (std::array<int64_t, 9>{0, 0, 0, 192, 192, 192, 384, 384, 576}));
  std::array<int64_t, 4> columns{};
  for (int rank = 0; rank < 4; ++rank) {
    const LeafRange leaves = LeavesOfRank(rank, 4);
    columns[static_cast<size_t>(rank)] = plan.bounds[static_cast<size_t>(leaves.end)] -
                                         plan.bounds[static_cast<size_t>(leaves.begin)];
  }
  EXPECT_EQ(columns, (std::array<int64_t, 4>{0, 192, 192, 192}));
}

TEST(LeafPlanTest, RanksOwnAdjacentEqualShares) {
  for (const int size : {1, 2, 4, 8}) {
    int next = 0;
    for (int rank = 0; rank < size; ++rank) {
      const LeafRange leaves = LeavesOfRank(rank, size);
      EXPECT_EQ(leaves.begin, next);
      EXPECT_EQ(leaves.end - leaves.begin, kLeaves / size);
      next = leaves.end;
    }
    EXPECT_EQ(next, kLeaves);
  }
}

// Sums whose order shows: 2^24 swallows a 1.
constexpr float kSums[kLeaves] = {0x1p24f, 1.0f, 1.0f, -0x1p24f, 1.0f, 1.0f, 0x1p25f, 3.0f};

TEST(LeafPlanTest, TreeOfRanksIsTheWholeTree) {
  const float whole = TreeOf(kSums, kLeaves);
  for (const int size : {1, 2, 4, 8}) {
    float partials[kLeaves];
    for (int rank = 0; rank < size; ++rank) {
      const LeafRange leaves = LeavesOfRank(rank, size);
      partials[rank] = TreeOf(kSums + leaves.begin, leaves.end - leaves.begin);
    }
    EXPECT_EQ(TreeOf(partials, size), whole) << size;
  }
  EXPECT_NE(ChainOf(kSums, kLeaves), whole);
}

TEST(LeafPlanTest, ChainGoesFromLeftToRight) {
  float sum = kSums[0];
  for (int l = 1; l < kLeaves; ++l) sum += kSums[l];
  EXPECT_EQ(ChainOf(kSums, kLeaves), sum);
  EXPECT_EQ(ChainOf(kSums, 1), kSums[0]);
}

}  // namespace
}  // namespace isobit::contract
