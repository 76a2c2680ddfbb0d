// Which splits consecutive sequences share, against the definition in shared_splits.h. Needs no
// GPU.
#include "kernels/cuda/common/step_tables/shared_splits.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/constants.h"

namespace isobit::cuda {
namespace {

using contract::kSplit;

// A step's sequences with tables of their own.
struct Step {
  int32_t page_size = 16;
  std::vector<SequenceRows> sequences;
  std::vector<std::vector<int32_t>> tables;

  // Adds a sequence of so many rows whose first `same` pages are those of the sequence before.
  void Add(int64_t first_position, size_t same, int64_t rows = 1) {
    std::vector<int32_t> table;
    if (same > 0) table.assign(tables.back().begin(), tables.back().begin() + same);
    while (static_cast<int64_t>(table.size()) * page_size < first_position + rows) {
      table.push_back(next_page++);
    }
    tables.push_back(std::move(table));
    sequences.push_back({.num_rows = rows, .first_position = first_position});
    for (size_t i = 0; i < tables.size(); ++i) sequences[i].pages = tables[i].data();
  }

  int32_t next_page = 0;
};

struct Found {
  explicit Found(const Step& step, size_t padding = 0)
      : own_split(step.sequences.size() + padding, -1),
        groups(step.sequences.size() + padding, SharedSplits{9, 9, 9, 9}),
        saved(FindSharedSplits(step.sequences, step.page_size, absl::MakeSpan(own_split),
                               absl::MakeSpan(groups))) {}

  // The groups that have sequences, as {first sequence, sequences, first split, end split}.
  std::vector<std::vector<int32_t>> Groups() const {
    std::vector<std::vector<int32_t>> all;
    for (const SharedSplits& g : groups) {
      if (g.num_sequences == 0) continue;
      all.push_back({g.first_sequence, g.num_sequences, g.first_split, g.end_split});
    }
    std::sort(all.begin(), all.end());
    return all;
  }

  std::vector<int32_t> own_split;
  std::vector<SharedSplits> groups;
  int64_t saved;
};

using Groups = std::vector<std::vector<int32_t>>;

TEST(SharedSplitsTest, SamplesOfAPromptAreAGroup) {
  Step step;
  for (int i = 0; i < 8; ++i) step.Add(1024 + 7 * i, i == 0 ? 0 : 64);
  const Found found(step, 2);
  EXPECT_EQ(found.Groups(), (Groups{{0, 8, 0, 2}}));
  EXPECT_EQ(found.own_split, (std::vector<int32_t>{2, 2, 2, 2, 2, 2, 2, 2, 0, 0}));
  EXPECT_EQ(found.saved, 14);
}

// Two prompts that begin with the same system prompt: its split is read once for all, the prompts'
// own splits once for each.
TEST(SharedSplitsTest, RunsOfALaterSplitLieWithinThoseOfAnEarlierOne) {
  Step step;
  step.Add(2000, 0);
  step.Add(2000, 96);  // 3 splits
  step.Add(2000, 32);  // 1 split
  step.Add(2000, 64);  // 2 splits
  step.Add(2000, 64);
  step.Add(2000, 0);  // alone
  const Found found(step);
  EXPECT_EQ(found.Groups(), (Groups{{0, 2, 1, 3}, {0, 5, 0, 1}, {2, 3, 1, 2}}));
  EXPECT_EQ(found.own_split, (std::vector<int32_t>{3, 3, 2, 2, 2, 0}));
  EXPECT_EQ(found.saved, 1 * 2 + 4 * 1 + 2 * 1);
}

// Tables that differ in the last page of a split do not share the split, for any page size.
TEST(SharedSplitsTest, EveryPageOfASplitCounts) {
  for (const int32_t page_size : {1, 3, 16, 128, 511, 512, 513, 1000, 1024, 4096}) {
    for (int64_t splits = 1; splits <= 3; ++splits) {
      const auto pages = static_cast<size_t>((splits * kSplit + page_size - 1) / page_size);
      for (const size_t same : {pages - 1, pages}) {
        Step step;
        step.page_size = page_size;
        step.Add(5000, 0);
        step.Add(5000, same);
        const auto shared = static_cast<int32_t>(static_cast<int64_t>(same) * page_size / kSplit);
        EXPECT_EQ(Found(step).own_split, (std::vector<int32_t>{shared, shared}))
            << page_size << ", " << splits;
        EXPECT_EQ(shared >= splits, same == pages) << page_size << ", " << splits;
      }
    }
  }
}

// A split that holds a position of this step is the sequence's own.
TEST(SharedSplitsTest, SharedSplitsLieBelowTheFirstPosition) {
  for (const auto& [position, splits] :
       std::vector<std::pair<int64_t, int32_t>>{{511, 0}, {512, 1}, {1023, 1}, {1024, 2}}) {
    Step step;
    step.Add(3000, 0);
    step.Add(position, static_cast<size_t>((position + 16) / 16));
    EXPECT_EQ(Found(step).own_split, (std::vector<int32_t>{splits, splits})) << position;
  }
}

TEST(SharedSplitsTest, OnlySequencesOfOneRowShare) {
  Step step;
  step.Add(600, 0);
  step.Add(600, 32, 2);
  step.Add(600, 32);
  step.Add(600, 32, 0);
  step.Add(600, 32);
  EXPECT_EQ(Found(step).Groups(), Groups{});
}

TEST(SharedSplitsTest, NoGroupCrossesAWindow) {
  Step step;
  for (int i = 0; i < 2 * kSharingWindow + 3; ++i) step.Add(520, i == 0 ? 0 : 32);
  const Found found(step);
  EXPECT_EQ(found.Groups(), (Groups{{0, kSharingWindow, 0, 1},
                                    {kSharingWindow, kSharingWindow, 0, 1},
                                    {2 * kSharingWindow, 3, 0, 1}}));
  // A window's groups stand at its own sequences.
  for (const size_t at : {0, kSharingWindow, 2 * kSharingWindow}) {
    EXPECT_EQ(found.groups[at].first_sequence, static_cast<int32_t>(at));
  }
}

// Whether neighbours s and s + 1 share a split, by the definition.
bool NeighboursShare(const Step& step, size_t s, int64_t split) {
  if (s + 1 >= step.sequences.size() || (s + 1) % kSharingWindow == 0) return false;
  const SequenceRows& a = step.sequences[s];
  const SequenceRows& b = step.sequences[s + 1];
  const int64_t end = (split + 1) * kSplit;
  if (a.num_rows != 1 || b.num_rows != 1) return false;
  if (end > a.first_position || end > b.first_position) return false;
  for (int64_t position = 0; position < end; ++position) {
    if (a.pages[position / step.page_size] != b.pages[position / step.page_size]) return false;
  }
  return true;
}

// Every split of a sequence is computed exactly once, and together by all neighbours that share it.
TEST(SharedSplitsTest, RandomStepsAgreeWithTheDefinition) {
  std::mt19937_64 random(1);
  const auto below = [&random](uint64_t n) { return random() % n; };
  int64_t shared = 0;
  for (int round = 0; round < 200; ++round) {
    constexpr int32_t kPageSizes[] = {1, 3, 16, 128, 700, 1024};
    Step step;
    step.page_size = kPageSizes[below(6)];
    const size_t count = 1 + below(round % 50 == 0 ? 1700 : 40);
    for (size_t s = 0; s < count; ++s) {
      const auto position = static_cast<int64_t>(below(round % 50 == 0 ? 1100 : 2600));
      const auto pages = static_cast<uint64_t>((position + 1) / step.page_size);
      const uint64_t most = s == 0 ? 0 : std::min<uint64_t>(pages, step.tables.back().size());
      const uint64_t same = below(6) == 0 ? below(most + 1) : below(5) == 0 ? 0 : most;
      step.Add(position, same, below(20) == 0 ? static_cast<int64_t>(below(3)) : 1);
    }
    const Found found(step);
    int64_t saved = 0;
    std::vector<std::vector<int>> group_of(count, std::vector<int>(8, -1));
    for (size_t g = 0; g < found.groups.size(); ++g) {
      const SharedSplits& group = found.groups[g];
      if (group.num_sequences == 0) continue;
      EXPECT_GE(group.num_sequences, 2);
      EXPECT_LT(group.first_split, group.end_split);
      EXPECT_EQ(static_cast<int32_t>(g) / kSharingWindow, group.first_sequence / kSharingWindow);
      saved += int64_t{group.num_sequences - 1} * (group.end_split - group.first_split);
      for (int32_t i = 0; i < group.num_sequences; ++i) {
        for (int32_t split = group.first_split; split < group.end_split; ++split) {
          int& of =
              group_of[static_cast<size_t>(group.first_sequence + i)][static_cast<size_t>(split)];
          EXPECT_EQ(of, -1) << "computed twice";
          of = static_cast<int>(g);
        }
      }
    }
    EXPECT_EQ(found.saved, saved);
    shared += saved;
    for (size_t s = 0; s < count; ++s) {
      for (int32_t split = 0; split < 8; ++split) {
        const int of = group_of[s][static_cast<size_t>(split)];
        EXPECT_EQ(of >= 0, split < found.own_split[s]);
        const bool with_next = NeighboursShare(step, s, split);
        const bool with_last = s > 0 && NeighboursShare(step, s - 1, split);
        EXPECT_EQ(of >= 0, with_next || with_last);
        if (s + 1 == count || of < 0) continue;
        EXPECT_EQ(of == group_of[s + 1][static_cast<size_t>(split)], with_next);
      }
    }
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
  EXPECT_GT(shared, 1000);
}

}  // namespace
}  // namespace isobit::cuda
