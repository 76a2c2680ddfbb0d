// The rotary table against long double, over the positions and frequencies it is used on.
#include "kernels/contract/rope.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/portable.h"

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

struct YarnGolden {
  int32_t head_dim;
  double theta;
  RopeScaling scaling;
  std::vector<uint32_t> frequencies;
  double attention;
  // cos and sin of the pairs 0, d/8, d/4, 3d/8 at positions 1, 1000, 131071.
  std::vector<std::pair<uint32_t, uint32_t>> table;
};

// The nearest floats of yarn's formula, from mpmath with 60 digits.
std::vector<YarnGolden> YarnGoldens() {
  return {
      // Qwen3 at 131072 tokens.
      {128,
       1e6,
       {.type = RopeScaling::Type::kYarn, .factor = 4, .original_max_positions = 32768},
       {0x3f800000, 0x3f4e4bac, 0x3f263de0, 0x3f05f6ee, 0x3ed7e89b, 0x3eadfcff, 0x3e8c3504,
        0x3e61f836, 0x3e361887, 0x3e12bd91, 0x3dec7fd5, 0x3dbe94c7, 0x3d99940e, 0x3d778512,
        0x3d47763f, 0x3d20bc1d, 0x3d0186e2, 0x3cd0c1a8, 0x3ca8398b, 0x3c879008, 0x3c5a7bf1,
        0x3c301052, 0x3c0de12d, 0x3be4aa46, 0x3bb02377, 0x3b876388, 0x3b4fa54f, 0x3b1ed248,
        0x3af241df, 0x3ab82bc0, 0x3a8b8207, 0x3a527db7, 0x3a1e0eb3, 0x39ec1968, 0x39af3d02,
        0x39811c3e, 0x393c93be, 0x39083e38, 0x38c23e9b, 0x38881d0a, 0x383a7753, 0x38164323,
        0x37f22ce3, 0x37c327b5, 0x379d43a4, 0x377d75d5, 0x374c3fbd, 0x372497ab, 0x3704a2b3,
        0x36d5c442, 0x36ac431d, 0x368ad0ed, 0x365fba4f, 0x36344a0e, 0x361148e2, 0x35ea2731,
        0x35bcb0c1, 0x35980e02, 0x35751070, 0x35457bab, 0x351f23e4, 0x35003dec, 0x34ceaf79,
        0x34a68e4c},
       0x1.237d37fe5d298p+0,
       {{0x3f1d7e04, 0x3f754797},
        {0x3f91abf5, 0x3d137563},
        {0x3f91be9a, 0x3a33f805},
        {0x3f91be9c, 0x371705d2},
        {0x3f23ed69, 0x3f7106c2},
        {0x3f8ea343, 0x3e6f75c5},
        {0x3f70175c, 0x3f254b45},
        {0x3f91bd72, 0x3c137b4a},
        {0xbf6e6eed, 0xbf27ad3c},
        {0xbf0c7513, 0xbf7f6aa8},
        {0xbf80b65a, 0xbf08be0c},
        {0x3f148293, 0x3f7ad1ec}}},
      // The lower bound falls below the first pair.
      {16,
       1e4,
       {.type = RopeScaling::Type::kYarn, .factor = 8, .original_max_positions = 32},
       {0x3f800000, 0x3e3625ae, 0x3c4ccccd, 0x3b8186e2, 0x3aa3d70a, 0x39cf3e37, 0x3903126f,
        0x3825cb5f},
       0x1.353bd3fd8bbe4p+0,
       {{0x3f271466, 0x3f821b08},
        {0x3f9a9ad2, 0x3c77616a},
        {0x3f9a9de2, 0x3ac5e8d6},
        {0x3f9a9dea, 0x391e53e2},
        {0x3f2de815, 0x3f7fb2f3},
        {0x3f9a46c4, 0xbda4123f},
        {0x3ec30441, 0x3f92baa1},
        {0x3f996915, 0x3e1a36eb},
        {0xbf7cf2b5, 0xbf31e255},
        {0x3d683d11, 0xbf9a7249},
        {0x3f896f16, 0x3f0dae01},
        {0xbf713e95, 0xbf4175a4}}},
      // Bounds between pairs.
      {64,
       1.5e5,
       {.type = RopeScaling::Type::kYarn,
        .factor = 32,
        .original_max_positions = 4096,
        .truncate = false},
       {0x3f800000, 0x3f306535, 0x3ef316a2, 0x3ea77faa, 0x3e66d3fa, 0x3e1f0cfd, 0x3ddb2f9f,
        0x3d970764, 0x3d502195, 0x3d01ddd5, 0x3c9e6470, 0x3c3dec94, 0x3bdea840, 0x3b7cfe15,
        0x3b093802, 0x3a89f777, 0x39ef543c, 0x390799b9, 0x3820adc6, 0x37dd6dfc, 0x37989328,
        0x375242fa, 0x3710e12c, 0x36c7a82b, 0x3689928c, 0x363d9647, 0x3602a245, 0x35b40669,
        0x35781728, 0x352af200, 0x34eb93ea, 0x34a252d3},
       0x1.58b90bfbe8e7cp+0,
       {{0x3f3a412a, 0x3f910982},
        {0x3fac2392, 0x3d8c125a},
        {0x3fac5c85, 0x3a212317},
        {0x3fac5c86, 0x36b9405d},
        {0x3f41dd6b, 0x3f8e85aa},
        {0x3f932407, 0x3f33888f},
        {0x3f9ab685, 0x3f17f3b8},
        {0x3fac5c27, 0x3bb4e8ba},
        {0xbf8cfd22, 0xbf464c88},
        {0x3fac4958, 0xbd229a50},
        {0xbfaaa341, 0xbe42858e},
        {0x3f94111b, 0x3f30762c}}},
  };
}

TEST(YarnTest, IsTheNearestFloatOfAnIndependentComputation) {
  for (const YarnGolden& golden : YarnGoldens()) {
    const std::vector<float> frequencies =
        InverseFrequencies(golden.head_dim, golden.theta, golden.scaling);
    ASSERT_EQ(frequencies.size(), golden.frequencies.size());
    for (size_t i = 0; i < frequencies.size(); ++i) {
      EXPECT_EQ(BitsOf(frequencies[i]), golden.frequencies[i]) << golden.head_dim << " " << i;
    }
    EXPECT_NEAR(AttentionFactor(golden.scaling), golden.attention, 0x1p-51);
    const RopeTable table = MakeRopeTable(131072, golden.head_dim, golden.theta, golden.scaling);
    auto expected = golden.table.begin();
    for (const size_t position : {size_t{1}, size_t{1000}, size_t{131071}}) {
      for (size_t i = 0; i < 4; ++i, ++expected) {
        const size_t at = position * frequencies.size() + i * frequencies.size() / 4;
        EXPECT_EQ(BitsOf(table.cosine[at]), expected->first) << position << " " << i;
        EXPECT_EQ(BitsOf(table.sine[at]), expected->second) << position << " " << i;
      }
    }
  }
}

TEST(YarnTest, AttentionFactor) {
  EXPECT_EQ(AttentionFactor({}), 1);
  RopeScaling scaling = {.type = RopeScaling::Type::kLinear, .factor = 4};
  EXPECT_EQ(AttentionFactor(scaling), 1);
  scaling.type = RopeScaling::Type::kYarn;
  scaling.mscale = 0.7;  // alone it counts for nothing
  EXPECT_NEAR(AttentionFactor(scaling), 0x1.237d37fe5d298p+0, 0x1p-51);
  scaling.mscale_all_dim = 1.5;
  EXPECT_NEAR(AttentionFactor(scaling), 0x1.d0fe0a983b164p-1, 0x1p-51);
  scaling.attention_factor = 1.25;
  EXPECT_EQ(AttentionFactor(scaling), 1.25);
  EXPECT_EQ(AttentionFactor({.type = RopeScaling::Type::kYarn, .factor = 1}), 1);
}

// If a context is too short or too long for the bounds, transformers' formula still applies
// unchanged.
TEST(YarnTest, BoundsThatMeetOrCross) {
  const std::vector<float> plain = InverseFrequencies(16, 1e4, {});
  RopeScaling scaling = {
      .type = RopeScaling::Type::kYarn, .factor = 4, .original_max_positions = 3};
  const std::vector<float> met = InverseFrequencies(16, 1e4, scaling);  // both at pair 0
  EXPECT_EQ(met[0], plain[0]);
  for (size_t i = 1; i < plain.size(); ++i) EXPECT_EQ(met[i], plain[i] / 4) << i;
  scaling.original_max_positions = 1;  // the upper one at -1, the lower one at 0
  EXPECT_EQ(InverseFrequencies(16, 1e4, scaling), plain);
  scaling.original_max_positions = 1 << 24;  // the lower one beyond the last pair
  scaling.beta_slow = 31;
  const std::vector<float> crossed = InverseFrequencies(16, 1e2, scaling);
  const std::vector<float> short_plain = InverseFrequencies(16, 1e2, {});
  for (size_t i = 0; i < crossed.size(); ++i) EXPECT_EQ(crossed[i], short_plain[i] / 4) << i;
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
