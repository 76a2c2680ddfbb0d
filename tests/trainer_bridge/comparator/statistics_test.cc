// Gap statistics against hand-computed values and an independent long double computation.
#include "trainer_bridge/comparator/statistics.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace isobit {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using Pairs = std::vector<std::pair<float, float>>;

GapStatistics Accumulate(const Pairs& pairs) {
  GapStatistics statistics;
  for (const auto& [rollout, scorer] : pairs) statistics.Add(ComputeGap(rollout, scorer));
  return statistics;
}

Pairs RandomPairs(int count, double noise) {
  std::mt19937 random(7);
  std::exponential_distribution<double> magnitude(0.5);
  std::normal_distribution<double> error(0, noise);
  Pairs pairs;
  for (int i = 0; i < count; ++i) {
    const float rollout = static_cast<float>(-magnitude(random));
    pairs.emplace_back(rollout, static_cast<float>(rollout + error(random)));
  }
  return pairs;
}

TEST(GapStatisticsTest, NothingAddedIsAllZeroAndHasNoCorrelation) {
  const GapStatistics empty;
  EXPECT_EQ(empty.num_tokens(), 0u);
  EXPECT_EQ(empty.mean_abs_dlogp(), 0.0);
  EXPECT_EQ(empty.effective_sample_size(), 0.0);
  EXPECT_EQ(empty.pearson_correlation(), std::nullopt);
}

TEST(GapStatisticsTest, EqualSidesGiveExactZerosAndOnes) {
  Pairs pairs = RandomPairs(1000, 1.0);
  for (auto& [rollout, scorer] : pairs) scorer = rollout;
  const GapStatistics statistics = Accumulate(pairs);
  EXPECT_EQ(statistics.num_tokens(), 1000u);
  EXPECT_EQ(statistics.num_unequal(), 0u);
  EXPECT_EQ(statistics.max_abs_dp(), 0.0);
  EXPECT_EQ(statistics.max_abs_dlogp(), 0.0);
  EXPECT_EQ(statistics.max_ulp_distance(), 0u);
  EXPECT_EQ(statistics.kl_k1(), 0.0);
  EXPECT_EQ(statistics.kl_k2(), 0.0);
  EXPECT_EQ(statistics.kl_k3(), 0.0);
  EXPECT_EQ(statistics.pearson_correlation(), 1.0);
  EXPECT_EQ(statistics.effective_sample_size(), 1000.0);
}

// Two tokens: (-1, -2) and (-3, -1), so log r = -1 and 2.
TEST(GapStatisticsTest, MatchesHandComputedValues) {
  const GapStatistics statistics = Accumulate({{-1, -2}, {-3, -1}});
  EXPECT_EQ(statistics.num_unequal(), 2u);
  EXPECT_EQ(statistics.max_abs_dlogp(), 2.0);
  EXPECT_EQ(statistics.mean_abs_dlogp(), 1.5);
  EXPECT_EQ(statistics.kl_k1(), -0.5);
  EXPECT_EQ(statistics.kl_k2(), 1.25);                             // (1/2 + 4/2) / 2
  EXPECT_NEAR(statistics.kl_k3(), 2.37846777005105, 1e-13);        // (e^-1 + e^2 - 3) / 2
  EXPECT_NEAR(statistics.max_abs_dp(), 0.318092372803578, 1e-13);  // e^-1 - e^-3
  EXPECT_NEAR(statistics.mean_abs_dp(), 0.275318265369204, 1e-13);
  // (e^-1 + e^2)^2 / (e^-2 + e^4)
  EXPECT_NEAR(statistics.effective_sample_size(), 1.09932793, 1e-8);
  EXPECT_NEAR(*statistics.pearson_correlation(), -1.0, 1e-15);  // two points, opposite slopes
}

TEST(GapStatisticsTest, MatchesAnIndependentComputation) {
  const Pairs pairs = RandomPairs(5000, 0.3);
  const GapStatistics statistics = Accumulate(pairs);
  long double k1 = 0, k2 = 0, k3 = 0, dp = 0, dlogp = 0, r1 = 0, r2 = 0, mean_p = 0, mean_q = 0;
  const long double n = static_cast<long double>(pairs.size());
  for (const auto& [a, b] : pairs) {
    const long double d = static_cast<long double>(b) - a;
    k1 -= d / n;
    k2 += d * d / 2 / n;
    k3 += (std::exp(d) - 1 - d) / n;
    dlogp += std::fabs(d) / n;
    dp += std::fabs(std::exp(static_cast<long double>(a)) - std::exp(static_cast<long double>(b))) /
          n;
    r1 += std::exp(d);
    r2 += std::exp(2 * d);
    mean_p += std::exp(static_cast<long double>(a)) / n;
    mean_q += std::exp(static_cast<long double>(b)) / n;
  }
  long double pp = 0, qq = 0, pq = 0;
  for (const auto& [a, b] : pairs) {
    const long double p = std::exp(static_cast<long double>(a)) - mean_p;
    const long double q = std::exp(static_cast<long double>(b)) - mean_q;
    pp += p * p;
    qq += q * q;
    pq += p * q;
  }
  EXPECT_NEAR(statistics.kl_k1(), static_cast<double>(k1), 1e-13);
  EXPECT_NEAR(statistics.kl_k2(), static_cast<double>(k2), 1e-13);
  EXPECT_NEAR(statistics.kl_k3(), static_cast<double>(k3), 1e-13);
  EXPECT_NEAR(statistics.mean_abs_dlogp(), static_cast<double>(dlogp), 1e-13);
  EXPECT_NEAR(statistics.mean_abs_dp(), static_cast<double>(dp), 1e-13);
  EXPECT_NEAR(statistics.effective_sample_size(), static_cast<double>(r1 * r1 / r2), 1e-8);
  EXPECT_NEAR(*statistics.pearson_correlation(), static_cast<double>(pq / std::sqrt(pp * qq)),
              1e-13);
}

TEST(GapStatisticsTest, SmallestGapsKeepTheirK3) {
  const float a = -0.5f;
  const float b = std::nextafter(a, -1.0f);
  const double d = std::ldexp(1.0, -24);
  EXPECT_NEAR(Accumulate({{a, b}}).kl_k3(), d * d / 2, d * d * 1e-6);
}

TEST(GapStatisticsTest, NanIsCountedAndMakesMaximaLargest) {
  const GapStatistics statistics = Accumulate({{-1, -1}, {kNan, -1}, {-1, kNan}, {kNan, kNan}});
  EXPECT_EQ(statistics.num_tokens(), 4u);
  EXPECT_EQ(statistics.num_unequal(), 3u);
  EXPECT_EQ(statistics.num_nan(), 3u);
  EXPECT_EQ(statistics.num_finite(), 1u);
  EXPECT_EQ(statistics.max_abs_dp(), 1.0);
  EXPECT_EQ(statistics.max_abs_dlogp(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(statistics.max_ulp_distance(), kNanUlpDistance);
  EXPECT_EQ(statistics.num_impossible(), 3u);
}

// Each aggregate, whichever side says what is not finite, alone and among a thousand equal tokens.
TEST(GapStatisticsTest, NothingThatIsNotFiniteVanishes) {
  for (const auto& pair : Pairs{{kNan, -1},
                                {-1, kNan},
                                {kNan, kNan},
                                {kInf, -1},
                                {-1, kInf},
                                {kInf, kInf},
                                {-kInf, -1},
                                {-1, -kInf},
                                {-kInf, -kInf},
                                {-kInf, kInf},
                                {kNan, -kInf}}) {
    for (const size_t others : {0u, 1u, 1000u}) {
      SCOPED_TRACE(std::to_string(pair.first) + ", " + std::to_string(pair.second) + " among " +
                   std::to_string(others));
      Pairs pairs = RandomPairs(static_cast<int>(others), 0);
      const GapStatistics before = Accumulate(pairs);
      GapStatistics merged = before;
      merged.Merge(Accumulate({pair}));
      pairs.push_back(pair);
      for (const GapStatistics& statistics : {Accumulate(pairs), merged}) {
        EXPECT_EQ(statistics.num_finite(), others);
        EXPECT_EQ(statistics.num_impossible(), 1u);
        EXPECT_GT(statistics.max_abs_dp(), 0.0);
        EXPECT_EQ(statistics.max_abs_dlogp(), std::numeric_limits<double>::infinity());
        for (const double mean :
             {statistics.mean_abs_dp(), statistics.mean_abs_dlogp(), statistics.kl_k1(),
              statistics.kl_k2(), statistics.kl_k3(), statistics.effective_sample_size(),
              statistics.pearson_correlation().value_or(0)}) {
          EXPECT_TRUE(std::isnan(mean)) << mean;
        }
      }
    }
  }
}

TEST(GapStatisticsTest, HugeRatiosDoNotOverflowTheSampleSize) {
  const GapStatistics statistics = Accumulate({{-2000, -1}, {-1, -2000}, {-2000, -1}});
  EXPECT_EQ(statistics.effective_sample_size(), 2.0);
}

TEST(GapStatisticsTest, CorrelationIsUndefinedForAConstantSide) {
  EXPECT_EQ(Accumulate({{-1, -1}}).pearson_correlation(), std::nullopt);
  EXPECT_EQ(Accumulate({{-1, -1}, {-1, -2}}).pearson_correlation(), std::nullopt);
}

TEST(GapStatisticsTest, MergeEqualsOnePass) {
  Pairs pairs = RandomPairs(3000, 0.3);
  const GapStatistics whole = Accumulate(pairs);
  GapStatistics merged;
  merged.Merge(GapStatistics());
  for (const auto& [begin, end] : {std::pair{0, 11}, {11, 11}, {11, 1500}, {1500, 3000}}) {
    merged.Merge(Accumulate(Pairs(pairs.begin() + begin, pairs.begin() + end)));
  }
  EXPECT_EQ(merged.num_tokens(), whole.num_tokens());
  EXPECT_EQ(merged.num_unequal(), whole.num_unequal());
  EXPECT_EQ(merged.num_nan(), 0u);
  EXPECT_EQ(merged.num_finite(), 3000u);
  EXPECT_EQ(merged.num_impossible(), whole.num_impossible());
  EXPECT_EQ(merged.max_abs_dp(), whole.max_abs_dp());
  EXPECT_EQ(merged.max_ulp_distance(), whole.max_ulp_distance());
  EXPECT_NEAR(merged.kl_k3(), whole.kl_k3(), 1e-14);
  EXPECT_NEAR(merged.mean_abs_dp(), whole.mean_abs_dp(), 1e-14);
  EXPECT_NEAR(merged.effective_sample_size(), whole.effective_sample_size(), 1e-9);
  EXPECT_NEAR(*merged.pearson_correlation(), *whole.pearson_correlation(), 1e-14);
}

TEST(GapStatisticsTest, SameOrderGivesSameBits) {
  const Pairs pairs = RandomPairs(1000, 0.3);
  const GapStatistics a = Accumulate(pairs);
  const GapStatistics b = Accumulate(pairs);
  EXPECT_EQ(std::bit_cast<uint64_t>(a.kl_k3()), std::bit_cast<uint64_t>(b.kl_k3()));
  EXPECT_EQ(std::bit_cast<uint64_t>(*a.pearson_correlation()),
            std::bit_cast<uint64_t>(*b.pearson_correlation()));
}

}  // namespace
}  // namespace isobit
