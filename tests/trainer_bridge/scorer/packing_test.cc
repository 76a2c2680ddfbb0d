// Packing: each sequence exactly once, no rank over its limit, in order of arrival.
#include "trainer_bridge/scorer/packing.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "trainer_bridge/scorer/page_numbers.h"

namespace isobit {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

int64_t Tokens(const std::vector<size_t>& rank, const std::vector<int64_t>& lengths) {
  return std::accumulate(rank.begin(), rank.end(), int64_t{0},
                         [&](int64_t sum, size_t s) { return sum + lengths[s]; });
}

// Sequences that share nothing.
std::vector<WaitingSequence> Strangers(const std::vector<int64_t>& lengths) {
  PageNumbers numbers(true);
  std::vector<WaitingSequence> waiting;
  int32_t id = 0;
  for (const int64_t length : lengths) {
    const std::vector<int32_t> tokens(static_cast<size_t>(length), id++);
    waiting.push_back({.tokens = length, .scored = length, .pages = numbers.Add({tokens, {}})});
  }
  return waiting;
}

PackedBatch PackStrangers(const std::vector<int64_t>& lengths, int ranks, int64_t limit) {
  return PackBatch(Strangers(lengths), ranks, limit);
}

// `groups` prompts with `completions` each, in order.
std::vector<WaitingSequence> Groups(int groups, int completions, int64_t prompt,
                                    int64_t completion) {
  PageNumbers numbers(true);
  std::vector<WaitingSequence> waiting;
  int32_t id = groups;
  for (int g = 0; g < groups; ++g) {
    for (int c = 0; c < completions; ++c) {
      const ScoreInput input = {std::vector<int32_t>(static_cast<size_t>(prompt), g),
                                std::vector<int32_t>(static_cast<size_t>(completion), id++)};
      waiting.push_back(
          {.tokens = prompt + completion, .scored = completion, .pages = numbers.Add(input)});
    }
  }
  return waiting;
}

// Tokens that a rank computes for these sequences.
int64_t Rows(const std::vector<size_t>& rank, const std::vector<WaitingSequence>& waiting) {
  std::set<int32_t> pages;
  int64_t rows = 0;
  for (const size_t s : rank) {
    int64_t shared = 0;
    for (const int32_t page : waiting[s].pages) shared += pages.insert(page).second ? 0 : 1;
    rows += waiting[s].tokens - shared * kScorePageSize;
  }
  return rows;
}

TEST(PackingTest, EverySequenceOfThePrefixIsOnExactlyOneRankWithinItsLimit) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 2000; ++trial) {
    // Few token ids and long runs of each, so that many sequences begin alike.
    std::vector<WaitingSequence> waiting;
    PageNumbers numbers(true);
    for (size_t i = random() % 40; i > 0; --i) {
      ScoreInput input;
      input.prompt.resize(16 * (random() % 4), static_cast<int32_t>(random() % 2));
      input.prompt.resize(input.prompt.size() + 1 + random() % 20, 7);
      input.completion.resize(random() % 20, static_cast<int32_t>(random() % 3));
      const int64_t tokens = input.num_tokens();
      waiting.push_back({.tokens = tokens,
                         .scored = 1 + static_cast<int64_t>(random() % 1000) % tokens,
                         .pages = numbers.Add(input)});
    }
    const int ranks = 1 + static_cast<int>(random() % 8);
    const int64_t limit = 1 + random() % 200;
    const PackedBatch batch = PackBatch(waiting, ranks, limit);

    ASSERT_EQ(batch.ranks.size(), static_cast<size_t>(ranks));
    ASSERT_EQ(batch.count > 0, !waiting.empty());
    std::set<size_t> seen;
    int64_t rows = 0;
    for (const std::vector<size_t>& rank : batch.ranks) {
      EXPECT_TRUE(std::is_sorted(rank.begin(), rank.end()));
      EXPECT_TRUE(rank.size() <= 1 || Rows(rank, waiting) <= limit);
      const int64_t scored =
          std::accumulate(rank.begin(), rank.end(), int64_t{0},
                          [&](int64_t sum, size_t s) { return sum + waiting[s].scored; });
      EXPECT_TRUE(rank.size() <= 1 || scored <= limit);
      for (const size_t s : rank) EXPECT_TRUE(seen.insert(s).second) << "sequence " << s;
      rows += Rows(rank, waiting);
    }
    EXPECT_EQ(batch.rows, rows);
    EXPECT_EQ(seen.size(), batch.count);
    EXPECT_TRUE(seen.empty() || *seen.rbegin() == batch.count - 1) << "not a prefix";
  }
}

// Sequences that share nothing are packed as without sharing: each to the rank with the fewest
// tokens, in order to see how many fit, then longest first if that fits.
TEST(PackingTest, StrangersGoToTheEmptiestRank) {
  const auto place = [](const std::vector<int64_t>& lengths, const std::vector<size_t>& order,
                        size_t ranks, int64_t limit) {
    std::vector<std::vector<size_t>> placed(ranks);
    for (const size_t s : order) {
      const auto emptiest = std::min_element(
          placed.begin(), placed.end(),
          [&](const auto& a, const auto& b) { return Tokens(a, lengths) < Tokens(b, lengths); });
      if (!emptiest->empty() && Tokens(*emptiest, lengths) + lengths[s] > limit) break;
      emptiest->push_back(s);
    }
    return placed;
  };
  const auto count = [](const std::vector<std::vector<size_t>>& placed) {
    return std::accumulate(placed.begin(), placed.end(), size_t{0},
                           [](size_t sum, const auto& rank) { return sum + rank.size(); });
  };
  std::mt19937 random(8);
  int num_unbalanced = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<int64_t> lengths(random() % 40);
    for (int64_t& length : lengths) length = 1 + random() % 80;
    const size_t ranks = 1 + random() % 8;
    const int64_t limit = 1 + random() % 200;
    std::vector<size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::vector<std::vector<size_t>> expected = place(lengths, order, ranks, limit);
    order.resize(count(expected));
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return lengths[a] > lengths[b]; });
    if (auto balanced = place(lengths, order, ranks, limit); count(balanced) == order.size()) {
      expected = std::move(balanced);
    } else {
      ++num_unbalanced;
    }
    for (std::vector<size_t>& rank : expected) std::sort(rank.begin(), rank.end());
    EXPECT_EQ(PackStrangers(lengths, static_cast<int>(ranks), limit).ranks, expected) << trial;
  }
  EXPECT_GT(num_unbalanced, 0);
}

TEST(PackingTest, CompletionsOfAPromptStayTogether) {
  // A group computes 64 + 4 * 32 = 192 tokens: two groups fit a rank of 400.
  const std::vector<WaitingSequence> waiting = Groups(6, 4, 64, 32);
  const PackedBatch batch = PackBatch(waiting, 2, 400);
  EXPECT_EQ(batch.count, 16u);
  EXPECT_EQ(batch.rows, 4 * 192);
  EXPECT_EQ(PackBatch(waiting, 3, 384).count, 24u);
  EXPECT_EQ(PackBatch(waiting, 3, 384).rows, 6 * 192);
}

TEST(PackingTest, AllRanksWorkOnOnePromptsCompletions) {
  const std::vector<WaitingSequence> waiting = Groups(1, 64, 1024, 256);
  const PackedBatch batch = PackBatch(waiting, 4, 16384);
  EXPECT_EQ(batch.count, 64u);
  for (const std::vector<size_t>& rank : batch.ranks) EXPECT_EQ(rank.size(), 16u);
  EXPECT_EQ(batch.rows, 4 * 1024 + 64 * 256);
}

TEST(PackingTest, NoRankRepeatsWhatMakesTheFullestNoFuller) {
  // Twelve completions of one prompt beside a sequence that is longer than all of them together.
  std::vector<WaitingSequence> waiting = Groups(1, 12, 320, 16);
  waiting.push_back({.tokens = 1024, .scored = 1024, .pages = {}});
  const PackedBatch batch = PackBatch(waiting, 4, 16384);
  EXPECT_EQ(batch.rows, 320 + 12 * 16 + 1024);
  EXPECT_THAT(batch.ranks, ElementsAre(ElementsAre(12), testing::SizeIs(12), IsEmpty(), IsEmpty()));
}

TEST(PackingTest, ARankScoresNoMoreThanItMayCompute) {
  // Equal sequences, of which all but the first cost nothing.
  const std::vector<WaitingSequence> waiting(20, {.tokens = 32, .scored = 31, .pages = {0, 1}});
  const PackedBatch batch = PackBatch(waiting, 2, 100);
  EXPECT_EQ(batch.count, 6u);
  EXPECT_EQ(batch.rows, 2 * 32);
}

TEST(PackingTest, TakesAllThatFits) {
  const std::vector<int64_t> lengths(12, 10);
  EXPECT_EQ(PackStrangers(lengths, 3, 40).count, 12u);
  EXPECT_EQ(PackStrangers(lengths, 3, 39).count, 9u);
}

TEST(PackingTest, TheLongOneDoesNotComeOnTopOfTheOthers) {
  const std::vector<int64_t> lengths = {50, 50, 100};
  EXPECT_THAT(PackStrangers(lengths, 2, 200).ranks, ElementsAre(ElementsAre(2), ElementsAre(0, 1)));
}

TEST(PackingTest, ASequenceOverTheLimitRunsAlone) {
  const std::vector<int64_t> lengths = {500, 1, 1};
  const PackedBatch batch = PackStrangers(lengths, 1, 10);
  EXPECT_EQ(batch.count, 1u);
  EXPECT_THAT(batch.ranks, ElementsAre(ElementsAre(0)));
}

TEST(PackingTest, RanksMayStayIdle) {
  EXPECT_THAT(PackBatch({}, 2, 10).ranks, ElementsAre(IsEmpty(), IsEmpty()));
  const std::vector<int64_t> one = {5};
  EXPECT_THAT(PackStrangers(one, 3, 10).ranks, ElementsAre(ElementsAre(0), IsEmpty(), IsEmpty()));
}

}  // namespace
}  // namespace isobit
