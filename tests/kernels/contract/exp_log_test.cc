// The error bounds that kernels/contract/exp_log.h states, over the whole range where each function
// is used; its exact values; and digests of so many values that a change of the last bit of the
// smallest coefficient shows.
#include "kernels/contract/exp_log.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/base/digest.h"
#include "gtest/gtest.h"

namespace isobit::contract {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Every stride-th float of [low, high], both positive, by bit pattern.
template <typename Body>
void ForEachFloat(float low, float high, uint32_t stride, const Body& body) {
  const uint64_t end = std::bit_cast<uint32_t>(high);
  for (uint64_t bits = std::bit_cast<uint32_t>(low); bits <= end; bits += stride) {
    body(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
}

// The largest relative error seen.
class ErrorBound {
 public:
  void Add(float actual, double expected) {
    const double error = std::abs((static_cast<double>(actual) - expected) / expected);
    if (!(error <= worst_)) worst_ = error;
  }
  double worst() const { return worst_; }

 private:
  double worst_ = 0;
};

// The digest of function(0), ..., function(count - 1).
std::string Digest(uint32_t count, absl::FunctionRef<float(uint32_t)> function) {
  std::vector<float> values(count);
  for (uint32_t i = 0; i < count; ++i) values[i] = function(i);
  return Sha256Hex(values.data(), values.size() * sizeof(float));
}

TEST(Exp2Test, RelativeError) {
  ErrorBound error;
  const auto check = [&error](float x) { error.Add(Exp2(x), std::exp2(static_cast<double>(x))); };
  ForEachFloat(0x1p-60f, 126.0f, 101, [&](float x) {
    check(x);
    check(-x);
  });
  for (float x = 126.0f; x < 127.5f; x += 0x1p-17f) check(x);
  for (float x = -1.0f; x < 1.0f; x += 0x1p-19f) check(x);  // densest where softmax lives
  EXPECT_LT(error.worst(), std::exp2(-22.3));
  EXPECT_GT(error.worst(), 0x1p-25);  // the sweep did look at inexact values
}

TEST(Exp2Test, WholeNumbersAreExact) {
  for (int n = -126; n <= 127; ++n) {
    EXPECT_EQ(Exp2(static_cast<float>(n)), std::ldexp(1.0f, n)) << n;
  }
  EXPECT_EQ(Exp2(-0.0f), 1.0f);
}

TEST(Exp2Test, Ends) {
  for (const float x : {-kInfinity, -1e30f, -1000.0f, -127.0f, -126.00001f}) {
    EXPECT_EQ(std::bit_cast<uint32_t>(Exp2(x)), 0u) << x;
  }
  EXPECT_EQ(Exp2(127.5f), kInfinity);
  EXPECT_EQ(Exp2(1e30f), kInfinity);
  EXPECT_EQ(Exp2(kInfinity), kInfinity);
  EXPECT_LT(Exp2(std::nextafter(127.5f, 0.0f)), kInfinity);
  EXPECT_TRUE(std::isnan(Exp2(kNan)));
}

TEST(Exp2Test, GrowsWithItsArgument) {
  float last = 0;
  for (float x = -126.0f; x < 127.5f; x += 0x1p-10f) {
    const float value = Exp2(x);
    EXPECT_GT(value, last) << x;
    last = value;
  }
}

TEST(Exp2Test, Digest) {
  EXPECT_EQ(
      Digest(1u << 22, [](uint32_t i) { return Exp2(-1.0f + static_cast<float>(i) * 0x1p-21f); }),
      "7ed4bba03f5d730347643ef0302269d19d5a19fb285a4b339128df5e0edba941");
}

TEST(LogTest, RelativeError) {
  ErrorBound error;
  const auto check = [&error](float x) {
    if (x != 1.0f) error.Add(Log(x), std::log(static_cast<double>(x)));
  };
  ForEachFloat(0x1p-126f, std::numeric_limits<float>::max(), 101, check);
  ForEachFloat(0.5f, 2.0f, 11, check);  // around 1, where the logarithm vanishes
  EXPECT_LT(error.worst(), 0x1p-22);
  EXPECT_GT(error.worst(), 0x1p-25);
}

TEST(LogTest, ExactValues) {
  EXPECT_EQ(Log(1.0f), 0.0f);
  EXPECT_EQ(Log(0.0f), -kInfinity);
  EXPECT_EQ(Log(-0.0f), -kInfinity);
  EXPECT_EQ(Log(std::bit_cast<float>(0x007fffffu)), -kInfinity);  // a subnormal counts as 0
  EXPECT_EQ(Log(kInfinity), kInfinity);
  for (const float x : {-1.0f, -kInfinity, kNan}) EXPECT_TRUE(std::isnan(Log(x))) << x;
}

TEST(LogTest, Digest) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3;
  EXPECT_EQ(
      Digest(1u << 22, [](uint32_t i) { return Log(std::bit_cast<float>(kSqrtHalf + 2 * i)); }),
      "dd6278025206a8c07918a4d61729404ef146cd6878f492332d3dc9f6b7c19d5f");
}

TEST(Log1mOfTest, RelativeError) {
  ErrorBound error;
  const auto check = [&error](float u) {
    error.Add(Log1mOf(u), std::log1p(-static_cast<double>(u)));
  };
  ForEachFloat(0x1p-40f, 0x1.fffffep-1f, 31, check);
  ForEachFloat(0.24f, 0.26f, 1, check);  // where the two forms meet
  EXPECT_LT(error.worst(), 0x1p-22);
  EXPECT_EQ(Log1mOf(0.0f), 0.0f);
}

TEST(SigmoidTest, ValueAndEnds) {
  ErrorBound error;
  for (float x = -80.0f; x < 80.0f; x += 0x1p-12f) {
    error.Add(Sigmoid(x), 1.0 / (1.0 + std::exp(-static_cast<double>(x))));
  }
  // Twice exp2's bound and the rounding of x * log2(e), which weighs most at x = -80.
  EXPECT_LT(error.worst(), 0x1p-17);
  EXPECT_EQ(Sigmoid(0.0f), 0.5f);
  EXPECT_EQ(Sigmoid(-1000.0f), 0.0f);
  EXPECT_EQ(Sigmoid(1000.0f), 1.0f);
  EXPECT_TRUE(std::isnan(Sigmoid(kNan)));
}

}  // namespace
}  // namespace isobit::contract
