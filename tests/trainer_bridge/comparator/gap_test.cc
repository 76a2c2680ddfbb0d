// Gaps of single tokens, compared with values computed by hand.
#include "trainer_bridge/comparator/gap.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace isobit {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }

TEST(UlpDistanceTest, CountsStepsBetweenFloats) {
  EXPECT_EQ(UlpDistance(-1.5f, -1.5f), 0u);
  EXPECT_EQ(UlpDistance(1.0f, std::nextafter(1.0f, 2.0f)), 1u);
  EXPECT_EQ(UlpDistance(std::nextafter(-1.0f, -2.0f), -1.0f), 1u);
  EXPECT_EQ(UlpDistance(1.0f, 2.0f), 1u << 23) << "one binade has 2^23 floats";
  EXPECT_EQ(UlpDistance(FromBits(0x3f7fffff), FromBits(0x3f800001)), 2u) << "across a binade";
}

TEST(UlpDistanceTest, CrossesZeroWithBothZerosAsNeighbours) {
  EXPECT_EQ(UlpDistance(-0.0f, 0.0f), 1u);
  const float smallest = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(UlpDistance(0.0f, smallest), 1u);
  EXPECT_EQ(UlpDistance(-smallest, smallest), 3u);
  EXPECT_EQ(UlpDistance(-kInf, kInf), 2u * 0x7f800000u + 1u) << "the largest distance of numbers";
  EXPECT_EQ(UlpDistance(std::numeric_limits<float>::max(), kInf), 1u);
}

TEST(UlpDistanceTest, NanIsFartherThanAnyNumber) {
  EXPECT_EQ(UlpDistance(kNan, kNan), kNanUlpDistance);
  EXPECT_EQ(UlpDistance(kNan, 1.0f), kNanUlpDistance);
  EXPECT_EQ(UlpDistance(-kInf, kNan), kNanUlpDistance);
  EXPECT_GT(kNanUlpDistance, UlpDistance(-kInf, kInf));
}

TEST(GapTest, EqualBitsGiveExactZeros) {
  const Gap gap = ComputeGap(-0.3125f, -0.3125f);
  EXPECT_TRUE(gap.equal);
  EXPECT_FALSE(gap.has_nan);
  EXPECT_EQ(gap.abs_dp, 0.0);
  EXPECT_EQ(gap.dlogp, 0.0);
  EXPECT_EQ(gap.ulp_distance, 0u);
}

TEST(GapTest, OneBitIsSeenInEveryMeasure) {
  const float a = -0.5f;
  const float b = FromBits(std::bit_cast<uint32_t>(a) + 1);  // -0.5 - 2^-24
  const Gap gap = ComputeGap(a, b);
  EXPECT_FALSE(gap.equal);
  EXPECT_EQ(gap.ulp_distance, 1u);
  EXPECT_EQ(gap.dlogp, std::ldexp(1.0, -24));
  // exp(-0.5) * (1 - exp(-2^-24)), to first order 0.60653066 * 5.9604645e-8
  EXPECT_NEAR(gap.abs_dp, 3.6152e-8, 1e-12);
}

TEST(GapTest, SignedZerosDiffer) {
  const Gap gap = ComputeGap(-0.0f, 0.0f);
  EXPECT_FALSE(gap.equal);
  EXPECT_EQ(gap.ulp_distance, 1u);
  EXPECT_EQ(gap.dlogp, 0.0);
  EXPECT_EQ(gap.abs_dp, 0.0);
}

TEST(GapTest, NanIsAMismatchEvenWithItself) {
  for (const auto& [a, b] : {std::pair{kNan, kNan}, {kNan, -1.0f}, {-1.0f, kNan}, {kNan, -kInf}}) {
    const Gap gap = ComputeGap(a, b);
    EXPECT_FALSE(gap.equal);
    EXPECT_TRUE(gap.has_nan);
    EXPECT_EQ(gap.abs_dp, 1.0);
    EXPECT_TRUE(std::isnan(gap.dlogp));
  }
}

TEST(GapTest, InfinitiesAreNumbers) {
  const Gap same = ComputeGap(-kInf, -kInf);
  EXPECT_TRUE(same.equal);
  EXPECT_TRUE(std::isnan(same.dlogp)) << "no number says how far infinities are apart";
  EXPECT_EQ(same.abs_dp, 1.0);
  const Gap apart = ComputeGap(0.0f, -kInf);
  EXPECT_FALSE(apart.equal);
  EXPECT_FALSE(apart.has_nan);
  EXPECT_EQ(apart.abs_dp, 1.0);
  EXPECT_EQ(apart.dlogp, std::numeric_limits<double>::infinity());
}

TEST(GapTest, WhatNoTokenIsDrawnWithIsImpossible) {
  const float above = std::numeric_limits<float>::denorm_min();
  for (const float odd : {kNan, -kInf, kInf, 5.0f, above}) {
    EXPECT_TRUE(ComputeGap(odd, -1.0f).impossible) << odd;
    EXPECT_TRUE(ComputeGap(-1.0f, odd).impossible) << odd;
    EXPECT_TRUE(ComputeGap(odd, odd).impossible) << odd;
  }
  for (const float good : {-1.0f, 0.0f, -0.0f, -above, std::numeric_limits<float>::lowest()}) {
    EXPECT_FALSE(ComputeGap(good, good).impossible) << good;
  }
}

}  // namespace
}  // namespace isobit
