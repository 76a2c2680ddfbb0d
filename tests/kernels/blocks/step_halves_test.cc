// A step that is cut in two has every row and position once and in order, in halves of nearly equal
// size. A sequence that is cut passes its state from one half to the other.
#include "kernels/blocks/step_halves.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace isobit {
namespace {

// For each row of the step: which sequence's pages it has, and its position.
using Places = std::vector<std::pair<const int32_t*, int64_t>>;

void Append(const std::vector<SequenceRows>& sequences, Places& places) {
  const size_t first = places.size();
  for (const SequenceRows& s : sequences) {
    ASSERT_EQ(static_cast<size_t>(s.first_row), places.size() - first);
    ASSERT_GT(s.num_rows, 0);
    for (int64_t i = 0; i < s.num_rows; ++i) places.emplace_back(s.pages, s.first_position + i);
  }
}

TEST(StepHalvesTest, CoversEveryRowOnce) {
  std::mt19937 random(3);
  const std::vector<int32_t> pages(200);
  for (int round = 0; round < 2000; ++round) {
    std::vector<SequenceRows> sequences;
    int64_t rows = 0;
    const auto count = static_cast<int64_t>(2 + random() % 30);
    const uint32_t most = round % 3 == 0 ? 1 : 1 + random() % 700;
    for (int64_t s = 0; s < count; ++s) {
      const auto num_rows = static_cast<int64_t>(1 + random() % most);
      sequences.push_back({.first_row = rows,
                           .num_rows = num_rows,
                           .first_position = static_cast<int64_t>(random() % 5),
                           .pages = pages.data() + s});
      rows += num_rows;
    }
    const StepHalves halves = CutStep(sequences);
    Places expected, actual;
    Append(sequences, expected);
    for (const StepHalf& half : halves.half) {
      ASSERT_EQ(half.first_row, static_cast<int64_t>(actual.size()));
      Append(half.sequences, actual);
      ASSERT_EQ(half.first_row + half.num_rows, static_cast<int64_t>(actual.size()));
      ASSERT_GE(half.num_rows, 1);
      ASSERT_LE(half.num_rows, MostRowsOfHalf(rows));
    }
    ASSERT_EQ(actual, expected);
  }
}

TEST(StepHalvesTest, LargeStepsAreCutBetweenTiles) {
  for (const int64_t rows : {256, 257, 1000, 8191, 8192}) {
    const StepHalves halves = CutStep({{.first_row = 0, .num_rows = rows}});
    EXPECT_EQ(halves.half[0].num_rows % 128, 0) << rows;
    EXPECT_LE(std::max(halves.half[0].num_rows, halves.half[1].num_rows), (rows + 1) / 2 + 64);
  }
}

TEST(StepHalvesTest, SlotsOfUncutSequencesStay) {
  const std::vector<SequenceRows> sequences = {
      {.first_row = 0, .num_rows = 2, .from_slot = kNoSlot, .to_slot = 3},
      {.first_row = 2, .num_rows = 2, .first_position = 7, .from_slot = 4, .to_slot = 4},
      {.first_row = 4, .num_rows = 2, .first_position = 9, .from_slot = 5, .to_slot = 6},
      {.first_row = 6, .num_rows = 2, .first_position = 9, .from_slot = 5, .to_slot = kNoSlot}};
  const StepHalves halves = CutStep(sequences);
  for (size_t h : {0u, 1u}) {
    ASSERT_EQ(halves.half[h].sequences.size(), 2u);
    for (size_t s : {0u, 1u}) {
      EXPECT_EQ(halves.half[h].sequences[s].from_slot, sequences[2 * h + s].from_slot);
      EXPECT_EQ(halves.half[h].sequences[s].to_slot, sequences[2 * h + s].to_slot);
    }
  }
}

TEST(StepHalvesTest, ACutSequencePassesItsState) {
  struct Case {
    int32_t from, to, at_cut;
  };
  for (const auto& [from, to, at_cut] : std::vector<Case>{{kNoSlot, kNoSlot, kCutSlot},
                                                          {4, kNoSlot, kCutSlot},
                                                          {kNoSlot, 5, 5},
                                                          {4, 5, 5},
                                                          {4, 4, 4}}) {
    SCOPED_TRACE(testing::Message() << from << " to " << to);
    const StepHalves halves = CutStep(
        {{.first_row = 0, .num_rows = 2, .from_slot = 1, .to_slot = 2},
         {.first_row = 2, .num_rows = 4, .first_position = 6, .from_slot = from, .to_slot = to},
         {.first_row = 6, .num_rows = 2, .from_slot = 3}});
    ASSERT_EQ(halves.half[0].sequences.size(), 2u);
    ASSERT_EQ(halves.half[1].sequences.size(), 2u);
    const SequenceRows& first = halves.half[0].sequences[1];
    const SequenceRows& second = halves.half[1].sequences[0];
    EXPECT_EQ(first.from_slot, from);
    EXPECT_EQ(first.to_slot, at_cut);
    EXPECT_EQ(second.from_slot, at_cut);
    EXPECT_EQ(second.to_slot, to);
    EXPECT_EQ(second.first_position, 8);
    EXPECT_EQ(halves.half[0].sequences[0].from_slot, 1);
    EXPECT_EQ(halves.half[0].sequences[0].to_slot, 2);
    EXPECT_EQ(halves.half[1].sequences[1].from_slot, 3);
    EXPECT_EQ(halves.half[1].sequences[1].to_slot, kNoSlot);
  }
}

// At most one sequence is cut, so that one slot is enough for its state.
TEST(StepHalvesTest, TheCutSlotHoldsOneState) {
  for (int64_t rows_of_each = 1; rows_of_each < 300; ++rows_of_each) {
    std::vector<SequenceRows> sequences;
    for (int64_t s = 0; s < 5; ++s) {
      sequences.push_back({.first_row = s * rows_of_each, .num_rows = rows_of_each});
    }
    const StepHalves halves = CutStep(sequences);
    int writers = 0, readers = 0;
    for (const SequenceRows& s : halves.half[0].sequences) writers += s.to_slot == kCutSlot;
    for (const SequenceRows& s : halves.half[1].sequences) readers += s.from_slot == kCutSlot;
    ASSERT_EQ(writers, readers);
    ASSERT_EQ(writers + 5,
              static_cast<int>(halves.half[0].sequences.size() + halves.half[1].sequences.size()));
  }
}

TEST(StepHalvesTest, MostRowsGrowWithTheStep) {
  for (int64_t rows = 2; rows < 9000; ++rows) {
    ASSERT_LE(MostRowsOfHalf(rows - 1), MostRowsOfHalf(rows));
    ASSERT_LE(MostRowsOfHalf(rows), rows);
  }
}

}  // namespace
}  // namespace isobit
