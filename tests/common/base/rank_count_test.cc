// Which numbers of ranks a group may have.
#include "common/base/rank_count.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing_support::StatusIs;

TEST(RankCountTest, PowersOfTwoUpToEight) {
  for (int64_t count = -1; count <= 16; ++count) {
    const bool expected = count == 1 || count == 2 || count == 4 || count == 8;
    EXPECT_EQ(CheckRankCount("ranks", count).ok(), expected) << count;
  }
  EXPECT_THAT(
      CheckRankCount("ranks of a sum", 3),
      StatusIs(absl::StatusCode::kInvalidArgument, "ranks of a sum: expected 1, 2, 4 or 8, got 3"));
}

}  // namespace
}  // namespace isobit
