// Every variant of mma_panel against the scalar contract, bit for bit, over inputs that reach every
// tier.
#include "kernels/cpu/mma_panel.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/contract/mma16.h"

namespace isobit::cpu {
namespace {

using Random = std::mt19937_64;
using Fill = std::function<float(Random&)>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float Normal(Random& random) { return std::normal_distribution<float>()(random); }

int Between(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

// Normal values whose exponents spread over about `binades` binades.
Fill Spread(int binades) {
  return [binades](Random& random) {
    return std::ldexp(Normal(random), Between(random, -binades / 2, binades / 2));
  };
}

Fill Scaled(Fill fill, int exponent) {
  return [fill = std::move(fill), exponent](Random& random) {
    return std::ldexp(fill(random), exponent);
  };
}

Fill Constant(float value) {
  return [value](Random&) { return value; };
}

// `rare` once in `period` values, `usual` otherwise.
Fill Mixed(Fill usual, Fill rare, int period) {
  return [usual = std::move(usual), rare = std::move(rare), period](Random& random) {
    return Between(random, 1, period) == 1 ? rare(random) : usual(random);
  };
}

Fill Zeros() {
  return [](Random& random) { return Between(random, 0, 1) == 0 ? 0.0f : -0.0f; };
}

Fill Integers() {
  return [](Random& random) { return static_cast<float>(Between(random, -2, 2)); };
}

Fill Subnormals() {
  return [](Random& random) { return std::ldexp(Normal(random), -130); };
}

// Any bit pattern with a finite value.
Fill AnyFinite() {
  return [](Random& random) {
    const uint32_t bits = static_cast<uint32_t>(random());
    return std::bit_cast<float>((bits >> 23 & 0xff) == 0xff ? bits ^ 0x40000000u : bits);
  };
}

struct Problem {
  std::string name;
  Fill x;
  Fill w;
  Fill c;
};

class MmaPanelTest : public testing::TestWithParam<Isa> {
 protected:
  // Runs `problem` and compares it with the contract. Returns the tiers it took.
  TierCounts Check(const Problem& problem, int64_t rows, int64_t panels, int64_t k, uint64_t seed) {
    Random random(seed);
    const int64_t ldx = k + 3;
    const int64_t ldc = panels * kPanelColumns + 5;
    const int64_t columns = panels * kPanelColumns;
    std::vector<uint16_t> x(rows * ldx);
    std::vector<uint16_t> w(columns * k);
    std::vector<float> c(rows * ldc);
    for (uint16_t& value : x) value = contract::FloatToBf16(problem.x(random));
    for (uint16_t& value : w) value = contract::FloatToBf16(problem.w(random));
    for (float& value : c) value = problem.c(random);

    std::vector<float> expected = c;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t n = 0; n < columns; ++n) {
        float& chain = expected[r * ldc + n];
        for (int64_t i = 0; i < k; i += contract::kMmaK) {
          chain = contract::Mma16(chain, &x[r * ldx + i], &w[n * k + i]);
        }
      }
    }

    std::vector<uint16_t> packed(columns * k);
    std::vector<ExponentRange> ranges;
    for (int64_t p = 0; p < panels; ++p) {
      ranges.push_back(PackPanel(&w[p * kPanelColumns * k], k, kPanelColumns, k,
                                 &packed[p * kPanelColumns * k]));
    }
    TierCounts tiers;
    GetMmaPanels(GetParam())({.w = {.data = packed.data(),
                                    .panel_stride = k * kPanelColumns,
                                    .k_stride = kPanelColumns,
                                    .ranges = ranges.data()},
                              .panels = panels,
                              .x = x.data(),
                              .ldx = ldx,
                              .rows = rows,
                              .k = k,
                              .c = c.data(),
                              .ldc = ldc,
                              .tiers = &tiers});
    int64_t wrong = 0;
    std::string first;
    for (size_t i = 0; i < c.size(); ++i) {
      if (std::bit_cast<uint32_t>(expected[i]) == std::bit_cast<uint32_t>(c[i])) continue;
      if (wrong++ == 0) {
        char text[128];
        std::snprintf(text, sizeof(text), "c[%zu] = %a, expected %a", i, c[i], expected[i]);
        first = text;
      }
    }
    EXPECT_EQ(wrong, 0) << problem.name << " rows " << rows << " panels " << panels << " k " << k
                        << ": " << first;
    return tiers;
  }
};

std::vector<Problem> FiniteProblems() {
  const Fill plus_zero = Constant(0.0f);
  const Fill wide_c = Spread(40);
  return {
      {"normal", Normal, Normal, plus_zero},
      {"a layer", Scaled(Normal, 2), Scaled(Spread(4), -6), plus_zero},
      {"12 binades", Spread(12), Spread(12), plus_zero},
      {"45 binades", Spread(45), Spread(45), plus_zero},
      {"110 binades", Spread(110), Spread(110), plus_zero},
      {"zeros", Mixed(Normal, Zeros(), 3), Mixed(Normal, Zeros(), 3), plus_zero},
      {"mostly zeros", Mixed(Zeros(), Normal, 20), Mixed(Zeros(), Normal, 20), plus_zero},
      {"all zero rows", Zeros(), Normal, Mixed(Normal, Zeros(), 2)},
      {"all zero weights", Normal, Zeros(), Mixed(Normal, Zeros(), 2)},
      {"zeros beside huge values", Mixed(Zeros(), Scaled(Normal, 100), 9), Zeros(), Normal},
      {"subnormal x", Subnormals(), Normal, plus_zero},
      {"subnormal x, large w", Subnormals(), Scaled(Normal, 90), Normal},
      {"subnormal w", Normal, Mixed(Normal, Subnormals(), 2), plus_zero},
      {"all subnormal", Subnormals(), Subnormals(), Subnormals()},
      {"cancellation", Integers(), Integers(), Integers()},
      {"small results", Scaled(Normal, -62), Scaled(Normal, -62), Scaled(Normal, -125)},
      {"small products on a chain", Scaled(Normal, -62), Scaled(Normal, -62), Normal},
      {"large x", Scaled(Spread(20), 60), Scaled(Normal, -8), Scaled(Normal, 55)},
      {"large w", Scaled(Normal, -30), Scaled(Normal, 20), plus_zero},
      {"near the largest sum", Mixed(Constant(1.9921875f), Constant(1.984375f), 7),
       Constant(1.9921875f), Mixed(plus_zero, Constant(1.9999f), 2)},
      {"beyond the largest sum", Constant(1.9921875f), Constant(-1.9921875f), Constant(-1.9999f)},
      {"chain above all", Normal, Normal, Scaled(Normal, 30)},
      {"chain of all kinds", Normal, Normal, Mixed(AnyFinite(), Subnormals(), 3)},
      {"chain over 40 binades", Spread(12), Normal, wide_c},
      {"one subnormal chain", Normal, Normal, Mixed(Normal, Subnormals(), 200)},
      {"any finite bits", AnyFinite(), AnyFinite(), AnyFinite()},
      {"overflow", Scaled(Normal, 62), Scaled(Normal, 62), Scaled(Normal, 120)},
      {"overflow of x", Scaled(Normal, 122), Scaled(Normal, 4), plus_zero},
      {"rare overflow", Mixed(Normal, Scaled(Normal, 64), 300),
       Mixed(Normal, Scaled(Normal, 63), 300), Normal},
  };
}

TEST_P(MmaPanelTest, EqualsTheContractForEveryFiniteInput) {
  uint64_t seed = 1;
  for (const Problem& problem : FiniteProblems()) {
    for (int64_t rows : {1, 2, 3, 4, 7}) Check(problem, rows, 2, 160, seed++);
    Check(problem, 3, 3, 16, seed++);
    Check(problem, 5, 1, 4096, seed++);
  }
}

TEST_P(MmaPanelTest, AnyNumberOfRows) {
  const Problem problem{"rows", Spread(8), Spread(8), Spread(8)};
  for (int64_t rows = 1; rows <= 17; ++rows) Check(problem, rows, 1, 272, rows);
}

TEST_P(MmaPanelTest, ManySmallProblemsOfEveryKind) {
  Random random(7);
  const std::vector<Problem> problems = FiniteProblems();
  for (uint64_t seed = 0; seed < 600; ++seed) {
    const Problem& x = problems[random() % problems.size()];
    const Problem& w = problems[random() % problems.size()];
    const Problem& c = problems[random() % problems.size()];
    Check({x.name + " x " + w.name + " on " + c.name, x.x, w.w, c.c}, 1 + seed % 5, 1,
          16 * (1 + seed % 3), seed);
  }
}

// The largest exponents and the smallest bits that the window admits, and the first it does not.
TEST_P(MmaPanelTest, TheEdgesOfTheWindow) {
  for (int e = -130; e <= 126; ++e) {
    const Fill x = Mixed(Normal, Scaled(Normal, e), 8);
    Check({"x edge " + std::to_string(e), x, Normal, Normal}, 2, 1, 64, 900 + e);
    Check({"w edge " + std::to_string(e), Normal, x, Normal}, 2, 1, 64, 1900 + e);
    Check({"c edge " + std::to_string(e), Normal, Normal, x}, 2, 1, 64, 2900 + e);
    Check({"product edge " + std::to_string(e), Scaled(Normal, e / 2), Scaled(Normal, e - e / 2),
           Scaled(Normal, e)},
          2, 1, 512, 3900 + e);
  }
  // Products that are equal, so that the last bit of each one counts.
  for (int e = -140; e <= 10; ++e) {
    const float factor = 1.9921875f;
    Check({"last bits " + std::to_string(e), Constant(std::ldexp(factor, e / 2)),
           Constant(std::ldexp(factor, e - e / 2)), Constant(0.0f)},
          1, 1, 64, 1);
  }
}

// One chain value grows as fast as possible within one block, while other products are zero.
TEST_P(MmaPanelTest, TheLargestChainsOfTheWindow) {
  for (int x = 0; x <= 8; ++x) {
    for (int w = 6; w <= 14; ++w) {
      for (int c = 22; c <= 26; ++c) {
        Check({"x " + std::to_string(x) + " w " + std::to_string(w) + " c " + std::to_string(c),
               Mixed(Constant(std::ldexp(1.9921875f, x)), Zeros(), 12),
               Constant(std::ldexp(1.9921875f, w)), Constant(std::ldexp(0x1.fffffep0f, c))},
              1, 1, 256, 1);
      }
    }
  }
}

TEST_P(MmaPanelTest, NonFiniteInputsFollowTheContract) {
  const Fill infinity = Constant(kInfinity);
  const Fill nan = Constant(std::numeric_limits<float>::quiet_NaN());
  const Fill some = Mixed(Normal, Mixed(infinity, nan, 3), 40);
  TierCounts tiers = Check({"x", some, Normal, Normal}, 5, 2, 96, 1);
  EXPECT_GT(tiers.scalar, 0);
  tiers = Check({"w", Normal, some, Normal}, 5, 2, 96, 2);
  EXPECT_GT(tiers.scalar, 0);
  tiers = Check({"c", Normal, Normal, some}, 5, 2, 96, 3);
  EXPECT_GT(tiers.scalar, 0);
  Check({"all", some, some, some}, 5, 2, 96, 4);
}

TEST_P(MmaPanelTest, EveryTierIsReachedByWhatNeedsIt) {
  const bool has_fast_tier = GetParam() != Isa::kPortable;
  const auto expect_fast = [&](const Problem& problem) {
    const TierCounts tiers = Check(problem, 6, 2, 512, 11);
    EXPECT_EQ(has_fast_tier ? tiers.fast : tiers.wide, 6 * 2 * 32) << problem.name;
    EXPECT_EQ(tiers.scalar, 0) << problem.name;
  };
  const Fill zero = Constant(0.0f);
  expect_fast({"normal", Normal, Normal, zero});
  expect_fast({"zero rows", zero, Normal, zero});
  expect_fast({"zero weights", Normal, zero, Normal});
  expect_fast(
      {"large activations", Mixed(Normal, Constant(16384.0f), 50), Scaled(Spread(20), -6), zero});
  expect_fast({"small probabilities", Mixed(zero, Scaled(Normal, -70), 2), Normal, Normal});

  const auto expect_wide = [&](const Problem& problem) {
    const TierCounts tiers = Check(problem, 6, 2, 512, 12);
    EXPECT_GT(tiers.wide, 0) << problem.name;
    EXPECT_EQ(tiers.scalar, 0) << problem.name;
  };
  expect_wide(
      {"110 binades", Mixed(Normal, Spread(110), 9), Mixed(Normal, Spread(110), 9), Normal});
  expect_wide({"sums beyond int32", Constant(1.9921875f), Constant(1.9921875f), Constant(1.9999f)});
  expect_wide({"a chain above the window", Normal, Normal, Scaled(Constant(1.5f), 30)});

  const auto expect_scalar = [&](const Problem& problem) {
    EXPECT_GT(Check(problem, 6, 2, 512, 13).scalar, 0) << problem.name;
  };
  expect_scalar({"overflow", Scaled(Normal, 62), Scaled(Normal, 63), zero});
  expect_scalar({"subnormal results", Scaled(Normal, -64), Scaled(Normal, -64), zero});
  expect_scalar({"an infinite chain", Normal, Normal, Mixed(Normal, Constant(kInfinity), 50)});
}

TEST_P(MmaPanelTest, ReadsAStridedViewInPlace) {
  Random random(5);
  const int64_t k = 48;
  const int64_t panels = 2;
  const int64_t stride = 100;
  std::vector<uint16_t> values(k * stride, 0x7fc0);  // elements that no panel covers are NaN
  std::vector<uint16_t> x(k);
  for (uint16_t& value : x) value = contract::FloatToBf16(Normal(random));
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < panels * kPanelColumns; ++j) {
      values[i * stride + j] = contract::FloatToBf16(Normal(random));
    }
  }
  ExponentRange ranges[panels];
  for (int64_t p = 0; p < panels; ++p) {
    ranges[p] = ScanPanel(&values[p * kPanelColumns], stride, k);
    EXPECT_LT(ranges[p].max, 140);
  }
  std::vector<float> c(panels * kPanelColumns);
  GetMmaPanels(GetParam())({.w = {.data = values.data(),
                                  .panel_stride = kPanelColumns,
                                  .k_stride = stride,
                                  .ranges = ranges},
                            .panels = panels,
                            .x = x.data(),
                            .ldx = k,
                            .rows = 1,
                            .k = k,
                            .c = c.data(),
                            .ldc = panels * kPanelColumns});
  for (int64_t n = 0; n < panels * kPanelColumns; ++n) {
    std::vector<uint16_t> column(k);
    for (int64_t i = 0; i < k; ++i) column[i] = values[i * stride + n];
    float expected = 0.0f;
    for (int64_t i = 0; i < k; i += contract::kMmaK) {
      expected = contract::Mma16(expected, &x[i], &column[i]);
    }
    EXPECT_EQ(std::bit_cast<uint32_t>(expected), std::bit_cast<uint32_t>(c[n])) << n;
  }
}

std::vector<Isa> RunnableIsas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (isa <= DetectIsa()) isas.push_back(isa);
  }
  return isas;
}

INSTANTIATE_TEST_SUITE_P(Isas, MmaPanelTest, testing::ValuesIn(RunnableIsas()),
                         [](const auto& info) { return std::string(IsaName(info.param)); });

TEST(PackPanelTest, PadsColumnsAndDepthWithZeros) {
  const std::vector<uint16_t> w = {0x3f80, 0x4000, 0x4040, 0x8000, 0x0001, 0xc080};  // 2 rows of 3
  std::vector<uint16_t> out(16 * kPanelColumns, 0xffff);
  const ExponentRange range = PackPanel(w.data(), 3, 2, 3, out.data());
  EXPECT_EQ(range.min_nonzero, 1);
  EXPECT_EQ(range.max, 129);
  for (int64_t k = 0; k < 16; ++k) {
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      EXPECT_EQ(out[k * kPanelColumns + j], k < 3 && j < 2 ? w[j * 3 + k] : 0) << k << " " << j;
    }
  }
}

TEST(IsaTest, NamesAreParsedBack) {
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    EXPECT_EQ(ParseIsa(IsaName(isa)), isa);
  }
  EXPECT_EQ(ParseIsa("avx"), std::nullopt);
}

}  // namespace
}  // namespace isobit::cpu
