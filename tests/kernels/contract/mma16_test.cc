// C1 and C2 on hand-made cases, one for each sentence of the definition.
#include "kernels/contract/mma16.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace isobit::contract {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A step with the given products, x[i] * y[i], and zeros for the rest.
struct Product {
  float x;
  float y;
};
float Step(float c, const std::vector<Product>& products) {
  std::array<Bf16, kMmaK> a{};
  std::array<Bf16, kMmaK> b{};
  for (size_t i = 0; i < products.size(); ++i) {
    a[i] = FloatToBf16(products[i].x);
    b[i] = FloatToBf16(products[i].y);
  }
  return Mma16(c, a.data(), b.data());
}

TEST(Mma16Test, AddsSmallIntegersExactly) {
  EXPECT_EQ(Step(5.0f, {{2.0f, 3.0f}, {-1.0f, 4.0f}}), 7.0f);
}

TEST(Mma16Test, TruncatesTheSumTowardZero) {
  // 1 + 2^-24 has no fp32; nearest-even would give 1 as well, so add 3/4 of an ulp.
  EXPECT_EQ(Step(1.0f, {{0x1p-24f, 1.5f}}), 1.0f);
  EXPECT_EQ(Step(-1.0f, {{-0x1p-24f, 1.5f}}), -1.0f);
}

TEST(Mma16Test, DropsWhatLiesBelowTheLargestExponentBy26) {
  // 2^-25 stays when the largest exponent is 0, and 16 of them make 2^-21.
  EXPECT_EQ(Step(1.0f, std::vector<Product>(16, {0x1p-25f, 1.0f})), 1.0f + 0x1p-21f);
  // 2^-26 does not, however many there are.
  EXPECT_EQ(Step(1.0f, std::vector<Product>(16, {0x1p-26f, 1.0f})), 1.0f);
}

TEST(Mma16Test, TermsTruncateBeforeTheyCancel) {
  // 1 + 2^-26 - 1: the small term is gone before the large ones cancel.
  EXPECT_EQ(Step(1.0f, {{0x1p-26f, 1.0f}, {-1.0f, 1.0f}}), 0.0f);
  EXPECT_EQ(Step(1.0f, {{0x1p-25f, 1.0f}, {-1.0f, 1.0f}}), 0x1p-25f);
}

TEST(Mma16Test, AnExponentIsTheSumOfItsFactorsExponents) {
  // 1.5 * 1.5 = 2.25 counts with exponent 0, not 1: so 2^-25 still survives.
  EXPECT_EQ(Step(0.0f, {{1.5f, 1.5f}, {0x1p-25f, 1.0f}, {-1.5f, 1.5f}}), 0x1p-25f);
}

TEST(Mma16Test, AZeroFactorRaisesNoExponent) {
  EXPECT_EQ(Step(0x1p-60f, {{0.0f, 0x1p100f}}), 0x1p-60f);
}

TEST(Mma16Test, AZeroIsAlwaysPositive) {
  EXPECT_EQ(BitsOf(Step(-0.0f, {})), 0u);
  EXPECT_EQ(BitsOf(Step(-0.0f, {{-1.0f, 0.0f}})), 0u);
  EXPECT_EQ(BitsOf(Step(-1.0f, {{1.0f, 1.0f}})), 0u);
}

TEST(Mma16Test, KeepsSubnormals) {
  EXPECT_EQ(Step(0x1p-149f, {}), 0x1p-149f);
  EXPECT_EQ(Step(0.0f, {{0x1p-100f, 0x1p-40f}}), 0x1p-140f);
}

TEST(Mma16Test, OverflowIsInfinite) {
  EXPECT_EQ(Step(0.0f, {{0x1p100f, 0x1p100f}}), kInfinity);
  EXPECT_EQ(Step(0.0f, {{-0x1p64f, 0x1p64f}}), -kInfinity);
  EXPECT_EQ(Step(0.0f, {{0x1p64f, 0x1p64f}, {-0x1p64f, 0x1p64f}}), 0.0f);
}

TEST(Mma16Test, InfinitiesAndNan) {
  EXPECT_EQ(Step(0.0f, {{kInfinity, 1.0f}}), kInfinity);
  EXPECT_EQ(Step(-kInfinity, {{1.0f, 1.0f}}), -kInfinity);
  constexpr uint32_t kNanBits = 0x7fffffffu;
  EXPECT_EQ(BitsOf(Step(0.0f, {{kInfinity, 0.0f}})), kNanBits);
  EXPECT_EQ(BitsOf(Step(kInfinity, {{-kInfinity, 1.0f}})), kNanBits);
  EXPECT_EQ(BitsOf(Step(std::nanf(""), {})), kNanBits);
}

TEST(Mma16Test, OperandsCommute) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::array<Bf16, kMmaK> a{};
    std::array<Bf16, kMmaK> b{};
    for (size_t k = 0; k < kMmaK; ++k) {
      a[k] = static_cast<Bf16>(random());
      b[k] = static_cast<Bf16>(random());
    }
    const float c = FromBits(static_cast<uint32_t>(random()));
    EXPECT_EQ(BitsOf(Mma16(c, a.data(), b.data())), BitsOf(Mma16(c, b.data(), a.data())));
  }
}

TEST(DotChainTest, ChainsStepsAndPadsTheEnd) {
  std::vector<Bf16> a(37);
  std::vector<Bf16> b(37);
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = FloatToBf16(normal(random));
    b[i] = FloatToBf16(normal(random));
  }
  std::vector<Bf16> padded_a = a;
  std::vector<Bf16> padded_b = b;
  padded_a.resize(48);
  padded_b.resize(48);
  float c = 0.25f;
  for (size_t k = 0; k < 48; k += kMmaK) c = Mma16(c, padded_a.data() + k, padded_b.data() + k);
  EXPECT_EQ(BitsOf(DotChain(0.25f, a.data(), b.data(), 37)), BitsOf(c));
  EXPECT_EQ(DotChain(0.25f, a.data(), b.data(), 0), 0.25f);
}

}  // namespace
}  // namespace isobit::contract
