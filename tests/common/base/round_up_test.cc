// Division and rounding up, at the edges.
#include "common/base/round_up.h"

#include <cstddef>
#include <cstdint>

#include "gtest/gtest.h"

namespace isobit {
namespace {

TEST(RoundUpTest, NextMultiple) {
  for (int64_t unit = 1; unit <= 9; ++unit) {
    for (int64_t a = 0; a <= 40; ++a) {
      const int64_t rounded = RoundUp(a, unit);
      EXPECT_EQ(rounded % unit, 0) << a << ", " << unit;
      EXPECT_TRUE(a <= rounded && rounded < a + unit) << a << ", " << unit << ": " << rounded;
      EXPECT_EQ(CeilDiv(a, unit) * unit, rounded);
    }
  }
  static_assert(CeilDiv(size_t{1} << 40, 3) == ((size_t{1} << 40) + 2) / 3);  // in the first's type
}

}  // namespace
}  // namespace isobit
