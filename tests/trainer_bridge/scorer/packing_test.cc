// Packing: each sequence exactly once, no rank over its limit, in order of arrival.
#include "trainer_bridge/scorer/packing.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace isobit {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

int64_t Tokens(const std::vector<size_t>& rank, const std::vector<int64_t>& lengths) {
  return std::accumulate(rank.begin(), rank.end(), int64_t{0},
                         [&](int64_t sum, size_t s) { return sum + lengths[s]; });
}

TEST(PackingTest, EverySequenceOfThePrefixIsOnExactlyOneRankWithinItsLimit) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<int64_t> lengths(random() % 40);
    for (int64_t& length : lengths) length = 1 + random() % 50;
    const int ranks = 1 + static_cast<int>(random() % 8);
    const int64_t limit = 1 + random() % 100;
    const PackedBatch batch = PackBatch(lengths, ranks, limit);

    ASSERT_EQ(batch.ranks.size(), static_cast<size_t>(ranks));
    ASSERT_EQ(batch.count > 0, !lengths.empty());
    std::set<size_t> seen;
    for (const std::vector<size_t>& rank : batch.ranks) {
      EXPECT_TRUE(std::is_sorted(rank.begin(), rank.end()));
      EXPECT_TRUE(rank.size() <= 1 || Tokens(rank, lengths) <= limit);
      for (const size_t s : rank) EXPECT_TRUE(seen.insert(s).second) << "sequence " << s;
    }
    EXPECT_EQ(seen.size(), batch.count);
    EXPECT_TRUE(seen.empty() || *seen.rbegin() == batch.count - 1) << "not a prefix";
  }
}

TEST(PackingTest, TakesAllThatFits) {
  const std::vector<int64_t> lengths(12, 10);
  EXPECT_EQ(PackBatch(lengths, 3, 40).count, 12u);
  EXPECT_EQ(PackBatch(lengths, 3, 39).count, 9u);
}

TEST(PackingTest, TheLongOneDoesNotComeOnTopOfTheOthers) {
  const std::vector<int64_t> lengths = {50, 50, 100};
  EXPECT_THAT(PackBatch(lengths, 2, 200).ranks, ElementsAre(ElementsAre(2), ElementsAre(0, 1)));
}

TEST(PackingTest, ASequenceOverTheLimitRunsAlone) {
  const std::vector<int64_t> lengths = {500, 1, 1};
  const PackedBatch batch = PackBatch(lengths, 1, 10);
  EXPECT_EQ(batch.count, 1u);
  EXPECT_THAT(batch.ranks, ElementsAre(ElementsAre(0)));
}

TEST(PackingTest, RanksMayStayIdle) {
  EXPECT_THAT(PackBatch({}, 2, 10).ranks, ElementsAre(IsEmpty(), IsEmpty()));
  const std::vector<int64_t> one = {5};
  EXPECT_THAT(PackBatch(one, 3, 10).ranks, ElementsAre(ElementsAre(0), IsEmpty(), IsEmpty()));
}

}  // namespace
}  // namespace isobit
