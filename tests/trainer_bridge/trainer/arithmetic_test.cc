// Sums and advantages: the bits that Python's math.fsum and completions.py give.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/status_matchers.h"
#include "trainer_bridge/trainer/advantages.h"
#include "trainer_bridge/trainer/exact_sum.h"

namespace isobit::trainer {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::StatusIs;

TEST(ExactSumTest, RoundsOnce) {
  EXPECT_EQ(ExactSum({}), 0.0);
  EXPECT_EQ(ExactSum({1e100, 1.0, -1e100}), 1.0);
  EXPECT_EQ(ExactSum({0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1}), 1.0);
  // Half way between two numbers, the even one; and not if anything lies below that half.
  EXPECT_EQ(ExactSum({1.0, 0x1p-53}), 1.0);
  EXPECT_EQ(ExactSum({1.0, 0x1p-53, 0x1p-106}), 1.0 + 0x1p-52);
  EXPECT_EQ(ExactSum({1.0 + 0x1p-52, 0x1p-53, -0x1p-106}), 1.0 + 0x1p-52);
  EXPECT_EQ(ExactSum({-1.0, -0x1p-53, -0x1p-106}), -1.0 - 0x1p-52);
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(ExactSum({1.0, infinity}), infinity);
  EXPECT_TRUE(std::isnan(ExactSum({infinity, -infinity})));
}

// INVARIANT: the order of the numbers changes no bit.
TEST(ExactSumTest, DoesNotDependOnOrder) {
  std::mt19937_64 random(5);
  std::vector<double> values;
  for (int i = 0; i < 500; ++i) {
    const double sign = random() % 2 == 0 ? 1.0 : -1.0;
    values.push_back(sign * std::ldexp(static_cast<double>(random() % 1000000),
                                       static_cast<int>(random() % 120) - 60));
  }
  const auto plain = [&values] {
    double sum = 0;
    for (const double value : values) sum += value;
    return sum;
  };
  const double expected = ExactSum(values);
  const double plain_before = plain();
  bool is_plain_other = false;
  for (int i = 0; i < 20; ++i) {
    std::shuffle(values.begin(), values.end(), random);
    EXPECT_EQ(ExactSum(values), expected);
    is_plain_other |= plain() != plain_before;
  }
  EXPECT_TRUE(is_plain_other) << "control";
}

// INVARIANT: these are the bits of completions.py, which printed them.
TEST(AdvantagesTest, HavePythonsBits) {
  const std::vector<double> rewards = {1.0 / 12, 5.0 / 12, 2.0 / 7, 0.0, 0.5, 0.5, 0.5, 0.5};
  const auto grpo = Advantages(rewards, 4, true);
  ISOBIT_ASSERT_OK(grpo);
  EXPECT_THAT(*grpo, ElementsAre(-0x1.60a3c4fc1f562p-1, 0x1.575c176146eeep+0, 0x1.166658255c1b9p-1,
                                 -0x1.323d60f5e5519p+0, 0.0, 0.0, 0.0, 0.0));
  const auto reinforce = Advantages(rewards, 4, false);
  ISOBIT_ASSERT_OK(reinforce);
  EXPECT_THAT(*reinforce,
              ElementsAre(-0x1.cf3cf3cf3cf3dp-4, 0x1.c30c30c30c30dp-3, 0x1.6db6db6db6db6p-4,
                          -0x1.9249249249249p-3, 0.0, 0.0, 0.0, 0.0));
  EXPECT_EQ(Deviation(rewards), 0x1.8760fbb1a1f3bp-3);
}

TEST(AdvantagesTest, RefusesWhatHasNoGroups) {
  EXPECT_THAT(Advantages({1.0, 2.0, 3.0}, 2, true),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("groups of 2, got 3")));
}

// One such reward would make its whole group's advantages NaN, or 0.
TEST(AdvantagesTest, NamesARewardThatIsNotFinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double bad : {std::nan(""), infinity, -infinity, 1e200, -1e39}) {
    for (const bool by_deviation : {false, true}) {
      EXPECT_THAT(
          Advantages({1.0, 0.0, 0.5, bad}, 2, by_deviation),
          StatusIs(absl::StatusCode::kInvalidArgument,
                   HasSubstr(absl::StrCat("rewards[3] (group 1, sample 1): expected a finite "
                                          "number below 2^127, got ",
                                          bad))));
    }
  }
}

}  // namespace
}  // namespace isobit::trainer
