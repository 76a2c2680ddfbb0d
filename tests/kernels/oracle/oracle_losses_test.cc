// The losses of tokens where something is NaN or infinite, the bounds that are refused, and what
// other losses are made of, against float64.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/losses.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/oracle/gradient_cases.h"

namespace isobit {
namespace {

using contract::Evaluate;
using contract::LossFunction;
using contract::ValueAndGradient;
using testing_support::NormalFloats;
using testing_support::Random;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Token {
  const char* what;
  float logprob;
  std::optional<float> old;
  std::optional<float> reference;
  float advantage;
  float weight;
};

ValueAndGradient LossOf(const Token& t, float clip_low = 0.2f, float clip_high = 0.2f) {
  ValueAndGradient result = {0.0f, 0.0f};
  PolicyLossArgs args;
  args.tokens = 1;
  args.logprobs = &t.logprob;
  args.advantages = &t.advantage;
  args.weights = &t.weight;
  args.old_logprobs = t.old ? &*t.old : nullptr;
  args.reference_logprobs = t.reference ? &*t.reference : nullptr;
  args.clip_low = clip_low;
  args.clip_high = clip_high;
  args.kl = 0.1f;
  args.values = &result.value;
  args.gradients = &result.gradient;
  EXPECT_TRUE(OracleBackend().Run(args).ok());
  return result;
}

// INVARIANT: a NaN reaches the value and the gradient, whichever side of the clipping it is on.
TEST(OracleLossesTest, NaNInNaNOut) {
  for (const float a : {1.0f, -1.0f}) {
    for (const Token& t :
         {Token{"logprob", kNaN, -1.0f, {}, a, 1.0f}, Token{"old", -1.0f, kNaN, {}, a, 1.0f},
          Token{"both -inf", -kInf, -kInf, {}, a, 1.0f},
          Token{"advantage", -1.0f, -1.5f, {}, kNaN, 1.0f},
          Token{"advantage, ratio 1", -1.0f, -1.0f, {}, kNaN, 1.0f},
          Token{"weight", -1.0f, -3.0f, {}, a, kNaN},
          Token{"reference", -1.0f, -1.0f, kNaN, a, 1.0f},
          Token{"advantage, no old", -1.0f, {}, {}, kNaN, 1.0f},
          Token{"0 times an infinite ratio", 0.0f, -100.0f, {}, 0.0f, 1.0f}}) {
      const ValueAndGradient loss = LossOf(t);
      EXPECT_TRUE(std::isnan(loss.value)) << t.what << ", advantage " << a;
      EXPECT_TRUE(std::isnan(loss.gradient)) << t.what << ", advantage " << a;
    }
  }
}

// What is not NaN stays as it was: infinities are clipped, or reach the loss.
TEST(OracleLossesTest, Infinities) {
  const ValueAndGradient clipped = LossOf({"", -1.0f, -kInf, {}, 2.0f, 1.0f});
  EXPECT_EQ(clipped.value, -2.4f);
  EXPECT_EQ(clipped.gradient, 0.0f);
  const ValueAndGradient unbounded = LossOf({"", -1.0f, -kInf, {}, -2.0f, 1.0f});
  EXPECT_EQ(unbounded.value, kInf);
  EXPECT_EQ(unbounded.gradient, kInf);
  const ValueAndGradient none = LossOf({"", -kInf, -1.0f, {}, 2.0f, 1.0f});
  EXPECT_EQ(none.value, 0.0f);
  EXPECT_EQ(none.gradient, 0.0f);
  const ValueAndGradient plain = LossOf({"", 0.0f, -3.0f, {}, 1.0f, 1.0f}, kInf, kInf);
  EXPECT_EQ(plain.gradient, -contract::ExpOf(3.0f)) << "no bounds";
}

TEST(OracleLossesTest, BoundsAreChecked) {
  struct Case {
    float low;
    float high;
    float kl;
    const char* expected;
  };
  for (const Case& c : {
           Case{-1.0f, 0.2f, 0.0f, "clip_low: expected at least 0, got -1"},
           Case{kNaN, 0.2f, 0.0f, "clip_low: expected at least 0, got nan"},
           Case{0.2f, -kInf, 0.0f, "clip_high: expected at least 0, got -inf"},
           Case{0.2f, kNaN, 0.0f, "clip_high: expected at least 0, got nan"},
           Case{0.2f, 0.2f, kNaN, "kl: expected a finite number of at least 0, got nan"},
           Case{0.2f, 0.2f, kInf, "kl: expected a finite number of at least 0, got inf"},
           Case{0.2f, 0.2f, -0.5f, "kl: expected a finite number of at least 0, got -0.5"},
       }) {
    PolicyLossArgs args;
    args.clip_low = c.low;
    args.clip_high = c.high;
    args.kl = c.kl;
    const absl::Status status = OracleBackend().Run(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), c.expected);
  }
}

struct Function {
  LossFunction function;
  std::function<double(double)> value;
  std::function<double(double)> gradient;
  std::vector<double> at;
};

std::vector<Function> Functions() {
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  const std::vector<double> both = {-80, -20, -3, -0.5, -0.001, 0, 0.001, 0.3, 1.3, 1.5, 9, 40, 80};
  return {
      {LossFunction::kExp,
       [](double x) { return std::exp(x); },
       [](double x) { return std::exp(x); },
       {-80, -1, -1e-6, 0, 0.5, 3, 80}},
      {LossFunction::kLog,
       [](double x) { return std::log(x); },
       [](double x) { return 1 / x; },
       {1e-30, 0.3, 0.999, 1, 1.001, 7, 1e30}},
      {LossFunction::kSigmoid,
       sigmoid,
       [=](double x) { return sigmoid(x) * sigmoid(-x); },
       {-20, -3, 0, 0.5, 3, 8}},
      {LossFunction::kLogSigmoid,
       [](double x) { return x < 0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x)); },
       [=](double x) { return sigmoid(-x); }, both},
  };
}

TEST(OracleLossesTest, FunctionsAreNearFloat64) {
  for (const Function& f : Functions()) {
    for (const double at : f.at) {
      const auto x = static_cast<float>(at);
      const ValueAndGradient got = Evaluate(f.function, x);
      const double value = f.value(x);
      const double gradient = f.gradient(x);
      // x * log2(e) is rounded before the power is taken.
      const double bound = 1e-6 + 1.2e-7 * std::abs(at);
      EXPECT_NEAR(got.value, value, bound * std::abs(value)) << static_cast<int>(f.function) << at;
      EXPECT_NEAR(got.gradient, gradient, 2 * bound * std::abs(gradient))
          << static_cast<int>(f.function) << " " << at;
    }
  }
}

TEST(OracleLossesTest, FunctionsAtTheEnds) {
  for (const LossFunction f : {LossFunction::kExp, LossFunction::kLog, LossFunction::kSigmoid,
                               LossFunction::kLogSigmoid}) {
    EXPECT_TRUE(std::isnan(Evaluate(f, kNaN).value) && std::isnan(Evaluate(f, kNaN).gradient));
  }
  const auto expect = [](LossFunction f, float x, float value, float gradient) {
    const ValueAndGradient got = Evaluate(f, x);
    EXPECT_EQ(got.value, value) << static_cast<int>(f) << " " << x;
    EXPECT_EQ(got.gradient, gradient) << static_cast<int>(f) << " " << x;
  };
  expect(LossFunction::kExp, -kInf, 0.0f, 0.0f);
  expect(LossFunction::kExp, kInf, kInf, kInf);
  expect(LossFunction::kLog, 0.0f, -kInf, kInf);
  expect(LossFunction::kLog, kInf, kInf, 0.0f);
  expect(LossFunction::kSigmoid, -kInf, 0.0f, 0.0f);
  expect(LossFunction::kSigmoid, kInf, 1.0f, 0.0f);
  expect(LossFunction::kLogSigmoid, -kInf, -kInf, 1.0f);
  expect(LossFunction::kLogSigmoid, kInf, 0.0f, 0.0f);
  const ValueAndGradient negative = Evaluate(LossFunction::kLog, -1.0f);
  EXPECT_TRUE(std::isnan(negative.value) && std::isnan(negative.gradient));
}

TEST(OracleLossesTest, SequenceSums) {
  Random random(2);
  const std::vector<int32_t> bounds = {0, 0, 1, 4, 104, 104, 1104};
  const std::vector<float> x = NormalFloats(1104, random);
  std::vector<float> sums(bounds.size() - 1, kNaN);
  ASSERT_TRUE(OracleBackend()
                  .Run(SequenceSumsArgs{x.data(), bounds.data(), static_cast<int64_t>(sums.size()),
                                        sums.data()})
                  .ok());
  for (size_t i = 0; i < sums.size(); ++i) {
    float own = 0;
    const int64_t count = bounds[i + 1] - bounds[i];
    ASSERT_TRUE(OracleBackend().Run(TreeSumArgs{x.data() + bounds[i], count, &own}).ok());
    EXPECT_EQ(sums[i], own) << "the tree of the sequence alone";
  }
  EXPECT_EQ(sums[0], 0.0f);
  EXPECT_EQ(sums[1], x[0]);
}

}  // namespace
}  // namespace isobit
