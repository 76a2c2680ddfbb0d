// A step that is cut in two has every row and position once and in order, in halves of nearly equal
// size.
#include "kernels/blocks/step_halves.h"

#include <algorithm>
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

TEST(StepHalvesTest, MostRowsGrowWithTheStep) {
  for (int64_t rows = 2; rows < 9000; ++rows) {
    ASSERT_LE(MostRowsOfHalf(rows - 1), MostRowsOfHalf(rows));
    ASSERT_LE(MostRowsOfHalf(rows), rows);
  }
}

}  // namespace
}  // namespace isobit
