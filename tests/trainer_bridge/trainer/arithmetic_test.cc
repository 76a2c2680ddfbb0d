// From rewards to advantages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/status_matchers.h"
#include "trainer_bridge/trainer/advantages.h"
#include "trainer_bridge/trainer/mean.h"

namespace isobit::trainer {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::StatusIs;

TEST(AdvantagesTest, AreDistancesFromTheGroupsMean) {
  const std::vector<double> rewards = {0.25, 0.75, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5};
  const auto reinforce = Advantages(rewards, 4, false);
  ISOBIT_ASSERT_OK(reinforce);
  EXPECT_THAT(*reinforce, ElementsAre(-0.25, 0.25, -0.5, 0.5, 0.0, 0.0, 0.0, 0.0));
  const auto grpo = Advantages(rewards, 4, true);
  ISOBIT_ASSERT_OK(grpo);
  const double deviation = std::sqrt(0.625 / 4);
  EXPECT_THAT(*grpo, ElementsAre(-0.25 / deviation, 0.25 / deviation, -0.5 / deviation,
                                 0.5 / deviation, 0.0, 0.0, 0.0, 0.0));
}

// The mean of equal numbers need not be that number.
TEST(AdvantagesTest, OfEqualRewardsAreZero) {
  const std::vector<double> rewards(3, 0.1);
  EXPECT_NE(Mean(rewards), 0.1) << "control";
  for (const bool by_deviation : {false, true}) {
    const auto advantages = Advantages(rewards, 3, by_deviation);
    ISOBIT_ASSERT_OK(advantages);
    EXPECT_THAT(*advantages, ElementsAre(0.0, 0.0, 0.0));
  }
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
