// C7's log-softmax and entropy against doubles, and C8's rules on hand-made values.
#include "kernels/contract/log_prob.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/sampling.h"

namespace isobit::contract {
namespace {

VocabSum SumOf(const std::vector<float>& z) {
  const LeafPlan plan = PlanColumns(static_cast<int64_t>(z.size()));
  VocabSum ranges[kLeaves];
  for (size_t l = 0; l < kLeaves; ++l) {
    const auto begin = z.begin() + plan.bounds[l];
    const auto end = z.begin() + plan.bounds[l + 1];
    const float max = begin == end ? kMinusInfinity : *std::max_element(begin, end);
    if (max == kMinusInfinity) continue;
    int64_t weights = 0;
    int64_t distances = 0;
    for (auto it = begin; it != end; ++it) {
      weights += TokenWeight(*it, max);
      distances += TokenWeightedDistance(*it, max);
    }
    ranges[l] = RangeSum(max, weights, distances);
  }
  return CombineRanges(ranges);
}

TEST(LogProbTest, AgreesWithDoubles) {
  std::mt19937_64 random(1);
  for (const float spread : {0.1f, 3.0f, 20.0f}) {
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> z(5000);
    for (float& value : z) value = normal(random);
    const double max = *std::ranges::max_element(z);
    double sum = 0;
    double weighted = 0;
    for (const float value : z) {
      sum += std::exp(value - max);
      weighted += std::exp(value - max) * (value - max);
    }
    const VocabSum all = SumOf(z);
    for (size_t i = 0; i < z.size(); i += 97) {
      const double exact = z[i] - max - std::log(sum);
      EXPECT_NEAR(LogProb(z[i], all), exact, 2e-6 * std::max(1.0, std::abs(exact)));
    }
    EXPECT_NEAR(Entropy(all), std::log(sum) - weighted / sum, 1e-5);
  }
}

TEST(LogProbTest, OneTokenIsCertain) {
  const VocabSum all = SumOf({3.5f});
  EXPECT_EQ(LogProb(3.5f, all), 0.0f);
  EXPECT_EQ(Entropy(all), 0.0f);
}

TEST(LogProbTest, FilteredTokensCountForNothing) {
  std::vector<float> z(40, kMinusInfinity);
  z[3] = 1.0f;
  z[39] = 1.0f;
  const VocabSum all = SumOf(z);
  EXPECT_NEAR(LogProb(1.0f, all), -std::log(2.0), 1e-7);
  EXPECT_EQ(LogProb(kMinusInfinity, all), kMinusInfinity);
  EXPECT_NEAR(Entropy(all), std::log(2.0), 1e-6);
}

TEST(TokenWeightTest, IsAFractionOf2To40) {
  EXPECT_EQ(TokenWeight(1.0f, 1.0f), int64_t{1} << 40);
  EXPECT_EQ(TokenWeight(-100.0f, 0.0f), 0);
  EXPECT_EQ(TokenWeight(kMinusInfinity, 0.0f), 0);
  EXPECT_EQ(TokenWeightedDistance(0.0f, 0.0f), 0);
  EXPECT_EQ(TokenWeightedDistance(kMinusInfinity, 0.0f), 0);
  EXPECT_LT(TokenWeightedDistance(-1.0f, 0.0f), 0);
}

// A fifth of the sum is in weights of about 2^-18, and each of them loses by truncation: one
// fraction bit more or less would change the sum.
TEST(TokenWeightTest, ManySmallWeightsShowTheirFractionBits) {
  std::vector<float> z(size_t{1} << 20, -40.0f);
  const size_t range = z.size() / kLeaves;
  for (size_t i = 3 * range; i < 4 * range; ++i) {
    z[i] = -12.0f - static_cast<float>((i + 3) % 1021) * 0x1p-9f;
  }
  z[3 * range + 77] = 0.0f;
  const VocabSum all = SumOf(z);
  EXPECT_EQ(BitsOf(all.sum), 0x3facbb51u);
  EXPECT_EQ(BitsOf(LogProb(0.0f, all)), 0xbe99737fu);
  EXPECT_EQ(BitsOf(Entropy(all)), 0x4065694du);
}

TEST(PenaliseTest, MeansWhatUsersKnow) {
  EXPECT_EQ(Penalise(2.0f, true, 0, 2.0f, 0.5f, 0.25f), 1.0f);     // in the prompt: repetition only
  EXPECT_EQ(Penalise(-2.0f, true, 0, 2.0f, 0.5f, 0.25f), -4.0f);   // a negative logit multiplies
  EXPECT_EQ(Penalise(2.0f, false, 3, 2.0f, 0.5f, 0.25f), -0.25f);  // 1 - 3/4 - 1/2
  EXPECT_EQ(Penalise(2.0f, false, 0, 2.0f, 0.5f, 0.25f), 2.0f);    // not seen at all
}

TEST(NucleusBoundTest, RoundsUp) {
  EXPECT_EQ(NucleusBound(10, 0.5f), 5);
  EXPECT_EQ(NucleusBound(11, 0.5f), 6);
  EXPECT_EQ(NucleusBound(int64_t{1} << 40, 0.25f), int64_t{1} << 38);
}

TEST(BeforeTest, LowestIdWinsATie) {
  EXPECT_TRUE(Before(2.0f, 9, 1.0f, 0));
  EXPECT_TRUE(Before(1.0f, 3, 1.0f, 4));
  EXPECT_FALSE(Before(1.0f, 4, 1.0f, 3));
  EXPECT_TRUE(Before(-0.0f, 3, 0.0f, 4));
  EXPECT_FALSE(Before(1.0f, 3, 1.0f, 3));
}

}  // namespace
}  // namespace isobit::contract
