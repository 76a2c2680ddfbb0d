// The counter-based generator against its authors' known answers, and the noise made from it.
#include "kernels/contract/noise.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <set>

#include "gtest/gtest.h"

namespace isobit::contract {
namespace {

void ExpectPhilox(uint64_t key, const PhiloxBlock& counter, const std::array<uint32_t, 4>& answer) {
  const PhiloxBlock block = Philox(key, counter);
  for (size_t i = 0; i < answer.size(); ++i) EXPECT_EQ(block.words[i], answer[i]) << i;
}

// Random123's kat_vectors for philox4x32-10.
TEST(PhiloxTest, KnownAnswers) {
  ExpectPhilox(0, {{0, 0, 0, 0}}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  ExpectPhilox(~uint64_t{0}, {{~0u, ~0u, ~0u, ~0u}},
               {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  ExpectPhilox(0x299f31d0a4093822, {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(TokenNoiseTest, EveryPartOfTheKeyCounts) {
  std::set<float> values;
  const float base = TokenGumbel(1, 2, 3, 4);
  values.insert({base, TokenGumbel(2, 2, 3, 4), TokenGumbel(uint64_t{1} << 40, 2, 3, 4),
                 TokenGumbel(1, 3, 3, 4), TokenGumbel(1, 2, 4, 4), TokenGumbel(1, 2, 3, 5),
                 TokenGumbel(1, 2, 3, 8)});
  EXPECT_EQ(values.size(), 7u);
  EXPECT_EQ(base, Gumbel(TokenNoise(1, 2, 3, 1).words[0]));
}

TEST(GumbelTest, EndsAreFinite) {
  EXPECT_NEAR(Gumbel(0), 22.87, 0.01);  // -log(2^-33); kernels rely on its staying below 23
  EXPECT_NEAR(Gumbel(~0u), -2.81, 0.02);
  EXPECT_NEAR(Gumbel(0x80000000u), -std::log(std::log(2.0)), 1e-5);
}

TEST(GumbelTest, FallsAsTheWordGrows) {
  float last = Gumbel(0);
  for (uint64_t word = 1u << 16; word < uint64_t{1} << 32; word += 1u << 16) {
    const float value = Gumbel(static_cast<uint32_t>(word));
    EXPECT_LE(value, last) << word;
    last = value;
  }
}

TEST(GumbelTest, Moments) {
  constexpr int kSamples = 400000;
  double sum = 0;
  double squares = 0;
  for (uint32_t i = 0; i < kSamples; ++i) {
    const double g = TokenGumbel(42, 0, 7, i);
    sum += g;
    squares += g * g;
  }
  const double mean = sum / kSamples;
  const double variance = squares / kSamples - mean * mean;
  // Five standard errors: 1.2825 / sqrt(n) of the mean, about 2.98 / sqrt(n) of the variance.
  EXPECT_NEAR(mean, 0.5772156649, 0.0102);
  EXPECT_NEAR(variance, 1.6449340668, 0.0236);
}

}  // namespace
}  // namespace isobit::contract
