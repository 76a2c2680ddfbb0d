// C5's row functions and C6's softmax update: against explicit trees, doubles and hand-made cases.
#include "kernels/contract/row_functions.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/attention.h"

namespace isobit::contract {
namespace {

// The tree as the contract draws it: padded to a power of two with +0, adjacent pairs first.
float PaddedTree(std::vector<float> leaves) {
  leaves.resize(std::bit_ceil(leaves.size()), 0.0f);
  while (leaves.size() > 1) {
    for (size_t i = 0; i < leaves.size() / 2; ++i) leaves[i] = leaves[2 * i] + leaves[2 * i + 1];
    leaves.resize(leaves.size() / 2);
  }
  return leaves.front();
}

TEST(TreeSumTest, EqualsThePaddedTree) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  for (size_t n = 1; n < 300; ++n) {
    std::vector<float> leaves;
    TreeSum sum;
    for (size_t i = 0; i < n; ++i) {
      leaves.push_back(std::ldexp(uniform(random), static_cast<int>(random() % 30)));
      sum.Push(leaves.back());
    }
    EXPECT_EQ(BitsOf(sum.Total()), BitsOf(PaddedTree(leaves))) << n;
  }
}

// The padding is +0, so a sum of zeros is -0 only if there is no padding and every leaf is -0.
TEST(TreeSumTest, PaddingDecidesTheSignOfZero) {
  for (size_t n = 1; n < 70; ++n) {
    TreeSum sum;
    TreeSum64 sum64;
    for (size_t i = 0; i < n; ++i) {
      sum.Push(-0.0f);
      sum64.Push(-0.0);
    }
    EXPECT_EQ(BitsOf(sum.Total()), BitsOf(PaddedTree(std::vector<float>(n, -0.0f)))) << n;
    EXPECT_EQ(std::signbit(sum64.Total()), std::has_single_bit(n)) << n;
  }
}

TEST(SumOfSquaresTest, LeavesOfFourThenATree) {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  for (int64_t n = 1; n < 200; ++n) {
    std::vector<Bf16> x;
    std::vector<float> leaves;
    for (int64_t i = 0; i < n; ++i) {
      x.push_back(FloatToBf16(normal(random)));
      const float v = Bf16ToFloat(x.back());
      if (i % 4 == 0) {
        leaves.push_back(v * v);
      } else {
        leaves.back() = std::fma(v, v, leaves.back());
      }
    }
    EXPECT_EQ(BitsOf(SumOfSquares(x.data(), n)), BitsOf(PaddedTree(leaves))) << n;
  }
}

TEST(FloatToBf16Test, RoundsToNearestEven) {
  EXPECT_EQ(FloatToBf16(1.0f), 0x3f80);
  EXPECT_EQ(FloatToBf16(FromBits(0x3f808000)), 0x3f80);  // a tie, down to even
  EXPECT_EQ(FloatToBf16(FromBits(0x3f818000)), 0x3f82);  // a tie, up to even
  EXPECT_EQ(FloatToBf16(FromBits(0x3f808001)), 0x3f81);
  EXPECT_EQ(FloatToBf16(-0.0f), 0x8000);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(FloatToBf16(FromBits(0xff800001)), 0x7fff);  // any NaN
}

TEST(RotateTest, TurnsByTheAngle) {
  const Bf16 one = FloatToBf16(1.0f);
  const Bf16 zero = 0;
  const Rotated quarter = Rotate(one, zero, 0.0f, 1.0f);
  EXPECT_EQ(Bf16ToFloat(quarter.first), 0.0f);
  EXPECT_EQ(quarter.second, one);
  const Rotated back = Rotate(zero, one, 0.0f, 1.0f);
  EXPECT_EQ(Bf16ToFloat(back.first), -1.0f);
}

TEST(AddResidualTest, RoundsTheSumBeforeItIsAdded) {
  // 1 + 2^-9 rounds to 1 in bf16, and 1 + 1 = 2; rounding once would give 2 too, so use 256 + 1.5:
  // the delta 1.5 + 2^-9 -> 1.5, and 256 + 1.5 -> 258 (to even), as 257.5 lies above the tie 257.
  EXPECT_EQ(Bf16ToFloat(AddResidual(FloatToBf16(256.0f), 1.5f, 0x1p-9f)), 258.0f);
  // The bias counts before the rounding: 0.5 + 0.5 lifts 256 to a tie that goes to even.
  EXPECT_EQ(Bf16ToFloat(AddResidual(FloatToBf16(256.0f), 0.5f, 0.5f)), 256.0f);
  EXPECT_EQ(Bf16ToFloat(AddResidual(FloatToBf16(256.0f), 0.5f, 0.5625f)), 258.0f);
}

TEST(SeesTest, CausalAndWindow) {
  EXPECT_TRUE(Sees(5, 5, 0));
  EXPECT_FALSE(Sees(5, 6, 0));
  EXPECT_TRUE(Sees(5, 0, 0));
  EXPECT_TRUE(Sees(5, 3, 3));
  EXPECT_FALSE(Sees(5, 2, 3));
}

// One update over all keys, and two over halves in different splits, approximate the same softmax.
TEST(SoftmaxTest, AgreesWithDoubles) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  constexpr int kKeys = 64;
  const float scale = AttentionScale(64);
  float scores[kKeys];
  double exact = 0;
  double max = -1e30;
  for (float& score : scores) {
    score = 20.0f * normal(random);
    max = std::max(max, static_cast<double>(score));
  }
  for (const float score : scores) exact += std::exp((score - max) / 8.0);

  float first[kKeys / 2];
  float second[kKeys / 2];
  std::copy_n(scores, kKeys / 2, first);
  std::copy_n(scores + kKeys / 2, kKeys / 2, second);
  SoftmaxRow whole;
  UpdateSoftmax(whole, scores, kKeys, scale);
  SoftmaxRow rows[2];
  UpdateSoftmax(rows[0], first, kKeys / 2, scale);
  UpdateSoftmax(rows[1], second, kKeys / 2, scale);
  SplitSum folded{kMinusInfinity, 0.0f};
  Fold(folded, FinishSplit(rows[0], scale));
  Fold(folded, FinishSplit(rows[1], scale));
  EXPECT_NEAR(FinishSplit(whole, scale).sum, exact, 1e-5 * exact);
  EXPECT_NEAR(folded.sum, exact, 1e-5 * exact);
}

TEST(SoftmaxTest, UnseenKeysWeighNothing) {
  float scores[16];
  std::fill_n(scores, 16, kMinusInfinity);
  scores[3] = 2.5f;
  SoftmaxRow row;
  EXPECT_EQ(UpdateSoftmax(row, scores, 16, 0.125f), 0.0f);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(scores[i], i == 3 ? 1.0f : 0.0f);
  EXPECT_EQ(row.max, 2.5f);
}

TEST(FoldTest, TheFirstSplitPassesUnchanged) {
  SplitSum sum{kMinusInfinity, 0.0f};
  const FoldFactors factors = Fold(sum, {1.75f, 3.0f});
  EXPECT_EQ(sum.max, 1.75f);
  EXPECT_EQ(sum.sum, 3.0f);
  EXPECT_EQ(FoldAccumulator(0.0f, -0.7f, factors), -0.7f);
}

// Two products and their sum round one by one; one of the factors is 1.
TEST(FoldTest, EachProductRounds) {
  std::mt19937_64 random(4);
  std::uniform_real_distribution<float> uniform(0.5f, 1.0f);
  int fused_differs = 0;
  for (int i = 0; i < 1000; ++i) {
    const float a = uniform(random);
    const float b = uniform(random);
    const FoldFactors f = {i % 2 == 0 ? 1.0f : uniform(random),
                           i % 2 == 0 ? uniform(random) : 1.0f};
    const float left = a * f.left;
    const float right = b * f.right;
    EXPECT_EQ(FoldAccumulator(a, b, f), left + right);
    fused_differs +=
        std::fma(a, f.left, right) != left + right || std::fma(b, f.right, left) != left + right;
  }
  EXPECT_GT(fused_differs, 100);
}

}  // namespace
}  // namespace isobit::contract
