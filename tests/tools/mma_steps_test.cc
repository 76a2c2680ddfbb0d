// The comparison behind isobit-numerics: a wrong step is found and named, and tensor cores with
// other rules are told apart from C1 by the steps that are compared.
#include "tools/mma_steps.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/contract/mma16.h"

namespace isobit {
namespace {

using contract::Bf16;
using contract::BitsOf;
using contract::FromBits;
using contract::kMmaK;
using contract::MmaTerm;
using contract::TermOf;

constexpr int64_t kSteps = 100000;

// A tensor core that adds `width` products at a time, keeps `fraction_bits`, has another floor of
// E, lets zeros count for E, or rounds its sum to nearest.
struct Rules {
  int width = kMmaK;
  int fraction_bits = contract::kMmaFractionBits;
  int min_exponent = contract::kMmaMinExponent;
  bool zeros_count = false;
  bool nearest = false;
};

// Finite operands alone.
float PartOfStep(const Rules& rules, float c, const Bf16* a, const Bf16* b) {
  std::vector<MmaTerm> terms = {TermOf(c)};
  for (int k = 0; k < rules.width; ++k) terms.push_back(TermOf(a[k], b[k]));
  int top = rules.min_exponent;
  for (const MmaTerm& term : terms) {
    if (term.magnitude != 0 || rules.zeros_count) top = std::max(top, term.exponent);
  }
  int64_t sum = 0;
  for (const MmaTerm& term : terms) {
    const int distance = top - term.exponent;
    if (term.magnitude == 0 || distance > 62) continue;
    const int64_t units = (term.magnitude << (rules.fraction_bits - 23)) >> distance;
    sum += term.negative ? -units : units;
  }
  const double exact = std::ldexp(static_cast<double>(sum), top - rules.fraction_bits);
  if (exact == 0) return 0.0f;
  float rounded = static_cast<float>(exact);  // to nearest
  if (!rules.nearest && std::fabs(static_cast<double>(rounded)) > std::fabs(exact)) {
    rounded = std::nextafterf(rounded, 0.0f);
    if (std::fabs(exact) >= 0x1p128) rounded = exact > 0 ? INFINITY : -INFINITY;
  }
  return rounded == 0 ? 0.0f : rounded;
}

bool IsFinite(const MmaSteps& steps, int64_t s) {
  const auto finite = [](Bf16 x) { return (x & 0x7f80) != 0x7f80; };
  return std::isfinite(steps.c[static_cast<size_t>(s)]) &&
         std::all_of(steps.StepA(s), steps.StepA(s) + kMmaK, finite) &&
         std::all_of(steps.StepB(s), steps.StepB(s) + kMmaK, finite);
}

std::vector<float> ResultsBy(const Rules& rules, const MmaSteps& steps) {
  std::vector<float> results(steps.c.size());
  for (int64_t s = 0; s < steps.steps(); ++s) {
    float c = steps.c[static_cast<size_t>(s)];
    if (!IsFinite(steps, s)) {
      results[static_cast<size_t>(s)] = contract::Mma16(c, steps.StepA(s), steps.StepB(s));
      continue;
    }
    for (int k = 0; k < kMmaK && std::isfinite(c); k += rules.width) {
      c = PartOfStep(rules, c, steps.StepA(s) + k, steps.StepB(s) + k);
    }
    results[static_cast<size_t>(s)] = c;
  }
  return results;
}

int64_t Different(const Rules& rules) {
  static const MmaSteps steps = MakeMmaSteps(kSteps, 1);
  static const std::vector<float> expected = ContractResults(steps);
  return CompareMmaSteps(steps, expected, ResultsBy(rules, steps)).different;
}

TEST(MmaStepsTest, AsManyStepsOfEachFamily) {
  const MmaSteps steps = MakeMmaSteps(kSteps, 1);
  EXPECT_GE(steps.steps(), kSteps);
  const std::vector<float> results = ContractResults(steps);
  const MmaComparison comparison = CompareMmaSteps(steps, results, results);
  EXPECT_EQ(comparison.steps, steps.steps());
  EXPECT_EQ(comparison.different, 0);
  EXPECT_FALSE(comparison.first.has_value());
  ASSERT_EQ(comparison.families.size(), MmaFamilies().size());
  for (const auto& family : comparison.families) {
    EXPECT_EQ(family.steps * static_cast<int64_t>(MmaFamilies().size()), steps.steps());
  }
}

TEST(MmaStepsTest, ASeedGivesTheSameSteps) {
  EXPECT_EQ(MakeMmaSteps(1, 1).a, MakeMmaSteps(1, 1).a);
  EXPECT_NE(MakeMmaSteps(1, 1).a, MakeMmaSteps(1, 2).a);
}

TEST(MmaStepsTest, FindsOneWrongBit) {
  const MmaSteps steps = MakeMmaSteps(kSteps, 1);
  const std::vector<float> expected = ContractResults(steps);
  for (const int64_t wrong :
       {int64_t{0}, int64_t{4095}, 3 * int64_t{kStepsPerTile} + 65, steps.steps() - 1}) {
    std::vector<float> got = expected;
    float& result = got[static_cast<size_t>(wrong)];
    result = FromBits(BitsOf(result) ^ 1u);
    const MmaComparison comparison = CompareMmaSteps(steps, expected, got);
    EXPECT_EQ(comparison.different, 1);
    ASSERT_TRUE(comparison.first.has_value());
    EXPECT_EQ(comparison.first->step, wrong);
    const size_t family = static_cast<size_t>(wrong / kStepsPerTile) % MmaFamilies().size();
    EXPECT_EQ(comparison.first->family, MmaFamilies()[family]);
    EXPECT_EQ(comparison.families[family].different, 1);
    // What the report names is the step itself.
    EXPECT_EQ(BitsOf(contract::Mma16(comparison.first->c, comparison.first->a.data(),
                                     comparison.first->b.data())),
              BitsOf(comparison.first->expected));
  }
}

TEST(MmaStepsTest, FindsAnotherNanAndAnotherZero) {
  const MmaSteps steps = MakeMmaSteps(kSteps, 1);
  const std::vector<float> expected = ContractResults(steps);
  for (const uint32_t bits : {0x7fffffffu, 0u}) {
    const auto at =
        std::find_if(expected.begin(), expected.end(), [&](float x) { return BitsOf(x) == bits; });
    ASSERT_NE(at, expected.end());
    std::vector<float> got = expected;
    got[static_cast<size_t>(at - expected.begin())] =
        FromBits(bits == 0 ? 0x80000000u : 0x7fc00000u);
    EXPECT_EQ(CompareMmaSteps(steps, expected, got).different, 1);
  }
}

// Without this, the tests of other rules below would show nothing.
TEST(MmaStepsTest, TheRulesOfC1DifferNowhere) { EXPECT_EQ(Different({}), 0); }

TEST(MmaStepsTest, TellsOtherTensorCoresApart) {
  EXPECT_GT(Different({.width = 8}), 1000) << "two steps of 8, as Ampere and Ada";
  EXPECT_GT(Different({.width = 4}), 1000);
  EXPECT_GT(Different({.fraction_bits = 24}), 1000);
  EXPECT_GT(Different({.fraction_bits = 26}), 1000);
  EXPECT_GT(Different({.min_exponent = -132}), 3);
  EXPECT_GT(Different({.min_exponent = -134}), 3);
  EXPECT_GT(Different({.min_exponent = -126}), 100) << "an exponent of subnormals as floor";
  EXPECT_GT(Different({.zeros_count = true}), 10);
  EXPECT_GT(Different({.nearest = true}), 1000);
}

}  // namespace
}  // namespace isobit
