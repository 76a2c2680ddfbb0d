// The gap between sampler and trainer: one bit is seen, and said where.
#include "trainer_bridge/trainer/logprob_gap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/status_matchers.h"

namespace isobit::trainer {
namespace {

using testing_support::StatusIs;

class LogprobGapTest : public testing::Test {
 protected:
  LogprobGapTest() {
    for (int32_t i = 0; i < 2; ++i) {
      Completion completion;
      completion.number = 7;
      completion.index = i;
      completion.logprobs = {-0.5f, -1.25f, -0.0f};
      completions_.push_back(completion);
      trainer_.push_back(completion.logprobs);
    }
  }

  LogprobGap Find() {
    auto gap = FindGap(completions_, trainer_);
    EXPECT_THAT(gap, testing_support::IsOk());
    return *std::move(gap);
  }

  std::vector<Completion> completions_;
  Logprobs trainer_;
};

TEST_F(LogprobGapTest, OfEqualBitsIsZero) {
  const LogprobGap gap = Find();
  EXPECT_EQ(gap.tokens, 6);
  EXPECT_EQ(gap.unequal, 0);
  EXPECT_EQ(gap.max_abs_dlogp, 0.0);
  EXPECT_EQ(gap.kl, 0.0);
  EXPECT_EQ(gap.first, "");
}

TEST_F(LogprobGapTest, SeesOneBit) {
  trainer_[1][1] = std::nextafter(-1.25f, 0.0f);
  const LogprobGap gap = Find();
  EXPECT_EQ(gap.unequal, 1);
  EXPECT_EQ(gap.max_abs_dlogp, 0x1p-23);
  EXPECT_GT(gap.kl, 0.0);
  EXPECT_EQ(gap.kl_k1, -0x1p-23 / 6);
  EXPECT_EQ(gap.kl_k2, 0x1p-47 / 6);
  EXPECT_EQ(gap.first,
            "prompt 7, sample 1, token 1: rollout -1.25 (0xbfa00000), trainer -1.24999988 "
            "(0xbf9fffff)");
}

TEST_F(LogprobGapTest, SeesTheSignOfZeroAndNan) {
  trainer_[0][2] = 0.0f;
  EXPECT_EQ(Find().unequal, 1);
  EXPECT_EQ(Find().max_abs_dlogp, 0.0);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  completions_[1].logprobs[0] = nan;
  trainer_[1][0] = nan;
  EXPECT_EQ(Find().unequal, 2);
  EXPECT_TRUE(std::isinf(Find().max_abs_dlogp));
}

TEST_F(LogprobGapTest, NothingThatIsNotFiniteVanishes) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto completions = completions_;
  const auto trainer = trainer_;
  for (const float odd : {kNan, kInf, -kInf}) {
    for (const int side : {0, 1, 2}) {  // rollout, trainer, both
      completions_ = completions;
      trainer_ = trainer;
      if (side != 1) completions_[1].logprobs[0] = odd;
      if (side != 0) trainer_[1][0] = odd;
      SCOPED_TRACE(testing::Message() << odd << " at side " << side);
      const LogprobGap gap = Find();
      EXPECT_EQ(gap.impossible, 1);
      EXPECT_EQ(gap.unequal, side == 2 && !std::isnan(odd) ? 0 : 1);
      EXPECT_TRUE(std::isinf(gap.max_abs_dlogp));
      for (const double kl : {gap.kl, gap.kl_k1, gap.kl_k2}) EXPECT_FALSE(std::isfinite(kl)) << kl;
      EXPECT_THAT(gap.first, testing::HasSubstr("prompt 7, sample 1, token 0"));
    }
  }
  completions_ = completions;
  trainer_ = trainer;
  completions_[1].logprobs[0] = trainer_[1][0] = 5.0f;
  EXPECT_EQ(Find().impossible, 1) << "equal bits, and no logprob of a token";
  EXPECT_EQ(Find().unequal, 0);
}

TEST_F(LogprobGapTest, RefusesOtherLengths) {
  trainer_[1].pop_back();
  EXPECT_THAT(FindGap(completions_, trainer_), StatusIs(absl::StatusCode::kInvalidArgument));
  trainer_.pop_back();
  EXPECT_THAT(FindGap(completions_, trainer_), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace isobit::trainer
