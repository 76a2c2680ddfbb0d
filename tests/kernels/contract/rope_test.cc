// The rotary table against long double, over the positions and frequencies it is used on.
#include "kernels/contract/rope.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "gtest/gtest.h"

namespace isobit::contract {
namespace {

using std::numbers::pi_v;

TEST(InverseFrequenciesTest, AreTheNearestFloats) {
  for (const double theta : {10000.0, 500000.0, 1e6, 1e9}) {
    for (const int32_t head_dim : {2, 16, 64, 80, 128, 256}) {
      const std::vector<float> frequencies = InverseFrequencies(head_dim, theta, {});
      ASSERT_EQ(frequencies.size(), static_cast<size_t>(head_dim / 2));
      for (int32_t i = 0; i < head_dim / 2; ++i) {
        const long double exact = powl(static_cast<long double>(theta), -2.0L * i / head_dim);
        EXPECT_EQ(frequencies[static_cast<size_t>(i)], static_cast<float>(exact))
            << theta << " " << head_dim << " " << i;
      }
    }
  }
}

TEST(InverseFrequenciesTest, LinearScalingDivides) {
  const std::vector<float> plain = InverseFrequencies(64, 10000.0, {});
  RopeScaling scaling;
  scaling.type = RopeScaling::Type::kLinear;
  scaling.factor = 4.0;
  const std::vector<float> scaled = InverseFrequencies(64, 10000.0, scaling);
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(scaled[i], plain[i] / 4.0f);
}

// Llama 3.1: short wavelengths stay, long ones divide by the factor, those between blend.
TEST(InverseFrequenciesTest, Llama3Scaling) {
  RopeScaling scaling;
  scaling.type = RopeScaling::Type::kLlama3;
  scaling.factor = 8.0;
  const std::vector<float> plain = InverseFrequencies(128, 500000.0, {});
  const std::vector<float> scaled = InverseFrequencies(128, 500000.0, scaling);
  int kept = 0;
  int divided = 0;
  int blended = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    const long double frequency = powl(500000.0L, -2.0L * static_cast<long double>(i) / 128);
    const long double wavelength = 2 * pi_v<long double> / frequency;
    long double expected = frequency;
    if (wavelength > 8192.0L) {
      expected = frequency / 8;
      ++divided;
    } else if (wavelength >= 2048.0L) {
      const long double smooth = (8192.0L / wavelength - 1) / 3;
      expected = (1 - smooth) * frequency / 8 + smooth * frequency;
      ++blended;
    } else {
      ++kept;
    }
    EXPECT_EQ(scaled[i], static_cast<float>(expected)) << i;
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(divided, 0);
  EXPECT_GT(blended, 0);
}

// The table rounds a float64 value whose error is far below half an ulp of fp32: it differs from
// the nearest float only next to a tie, and then by one.
TEST(MakeRopeTableTest, IsTheNearestFloat) {
  constexpr int64_t kPositions = 20000;
  constexpr int32_t kHeadDim = 32;
  const std::vector<float> frequencies = InverseFrequencies(kHeadDim, 10000.0, {});
  const RopeTable table = MakeRopeTable(kPositions, kHeadDim, 10000.0, {});
  ASSERT_EQ(table.cosine.size(), static_cast<size_t>(kPositions * kHeadDim / 2));
  ASSERT_EQ(table.sine.size(), table.cosine.size());
  int64_t off = 0;
  for (size_t i = 0; i < table.cosine.size(); ++i) {
    const auto position = static_cast<int64_t>(i / frequencies.size());
    const long double angle =
        static_cast<long double>(position) * frequencies[i % frequencies.size()];
    for (const auto& [actual, exact] :
         {std::pair{table.cosine[i], cosl(angle)}, std::pair{table.sine[i], sinl(angle)}}) {
      const auto nearest = static_cast<float>(exact);
      if (actual == nearest) continue;
      ++off;
      EXPECT_EQ(actual, std::nextafter(nearest, actual)) << i;
    }
  }
  EXPECT_LE(off, 2);
}

TEST(MakeRopeTableTest, HoldsToTheLastPosition) {
  constexpr int64_t kPositions = int64_t{1} << 20;
  const RopeTable table = MakeRopeTable(kPositions, 2, 10000.0, {});  // one frequency: 1
  for (int64_t p = kPositions - 3000; p < kPositions; ++p) {
    const auto i = static_cast<size_t>(p);
    EXPECT_NEAR(table.cosine[i], cosl(static_cast<long double>(p)), 0x1p-24);
    EXPECT_NEAR(table.sine[i], sinl(static_cast<long double>(p)), 0x1p-24);
  }
}

TEST(MakeRopeTableTest, PositionZeroTurnsNothing) {
  const RopeTable table = MakeRopeTable(1, 128, 10000.0, {});
  EXPECT_TRUE(std::ranges::all_of(table.cosine, [](float x) { return x == 1.0f; }));
  EXPECT_TRUE(std::ranges::all_of(table.sine, [](float x) { return x == 0.0f; }));
}

}  // namespace
}  // namespace isobit::contract
