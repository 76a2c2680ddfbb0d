// The sums of losses and squares, and AdamW, on a GPU against the oracle, bit for bit. Each with a
// control that shows that another order or expression would be found.

#include "kernels/ops/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/contract/gradients.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/ops/losses.h"
#include "tests/kernels/cuda/gradient_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::RandomFloats;
using testing_support::SameBits;
using testing_support::SameNumbers;
using testing_support::Scaled;
using testing_support::View;
using testing_support::Workspace;

class OptimizerTest : public testing_support::GradientTest {
 protected:
  std::vector<double> Doubles(int64_t n) {
    const std::vector<float> high = operands_.Floats(n, false);
    const std::vector<float> low = operands_.Floats(n, false);
    std::vector<double> values(high.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = high[i] + 0x1p-26 * low[i];
    return values;
  }

  float Tree(const std::vector<float>& x) {
    DeviceBuffer<float> in(x, Offset(sizeof(float)));
    DeviceBuffer<float> out(1);
    const TreeSumArgs args = {in.data(), in.size(), out.data()};
    const Workspace workspace;
    EXPECT_TRUE(cuda::Run(args, workspace.On(AnyStream())).ok());
    EXPECT_TRUE(out.GuardsIntact() && workspace.GuardsIntact());
    return out.CopyOut()[0];
  }
  double Tree(const std::vector<double>& x) {
    DeviceBuffer<double> in(x, Offset(sizeof(double)));
    DeviceBuffer<double> out(1);
    const TreeSum64Args args = {in.data(), in.size(), out.data()};
    const Workspace workspace;
    EXPECT_TRUE(cuda::Run(args, workspace.On(AnyStream())).ok());
    EXPECT_TRUE(out.GuardsIntact() && workspace.GuardsIntact());
    return out.CopyOut()[0];
  }
  std::vector<double> SquareSums(const std::vector<float>& x, int64_t rows, int64_t columns) {
    DeviceBuffer<float> in(x, Offset(sizeof(float)));
    DeviceBuffer<double> out(rows);
    EXPECT_TRUE(cuda::Run(SquareSumsArgs{in.data(), rows, columns, out.data()}, AnyStream()).ok());
    EXPECT_TRUE(out.GuardsIntact());
    return out.CopyOut();
  }
};

TEST_F(OptimizerTest, TreesOfEverySize) {
  std::vector<int64_t> sizes;
  for (int64_t n = 0; n < Scaled(140); ++n) sizes.push_back(n);
  for (const int64_t n : {511, 512, 513, 1023, 4095, 4096, 4097, 8192, 8193, 70000, 1 << 20}) {
    sizes.push_back(n);
  }
  sizes.push_back(4096 * 4096 + 12345);  // three launches
  for (int i = 0; i < Scaled(100); ++i) sizes.push_back(Below(int64_t{1} << (1 + Below(20))));
  for (const int64_t n : sizes) {
    SCOPED_TRACE(n);
    std::vector<float> x = operands_.Floats(n, false);
    if (Chance(4)) std::fill(x.begin(), x.end(), -0.0f);  // the padding is +0
    std::vector<float> sum(1);
    ASSERT_TRUE(oracle_.Run(TreeSumArgs{x.data(), n, sum.data()}).ok());
    EXPECT_TRUE(SameNumbers(std::vector<float>{Tree(x)}, sum));
    std::vector<double> x64 = Doubles(n);
    if (Chance(4)) std::fill(x64.begin(), x64.end(), -0.0);
    std::vector<double> sum64(1);
    ASSERT_TRUE(oracle_.Run(TreeSum64Args{x64.data(), n, sum64.data()}).ok());
    EXPECT_TRUE(SameNumbers(std::vector<double>{Tree(x64)}, sum64));
    if (HasFailure()) break;
  }
}

TEST_F(OptimizerTest, SumsOfSequences) {
  for (int i = 0; i < Scaled(60) && !HasFailure(); ++i) {
    std::vector<int32_t> bounds = {0};
    const int64_t sequences = Below(40);
    for (int64_t s = 0; s < sequences; ++s) {
      // Some of several subtrees of a block, some of the sizes beside one.
      const int64_t length = Chance(6)   ? 4095 + Below(3)
                             : Chance(6) ? Below(40000)
                                         : Below(int64_t{1} << (1 + Below(10)));
      bounds.push_back(bounds.back() + static_cast<int32_t>(length));
    }
    SCOPED_TRACE(absl::StrCat("case ", i, ", ", sequences, " sequences, ", bounds.back()));
    std::vector<float> x = operands_.Floats(bounds.back(), Chance(8));
    if (Chance(4)) std::fill(x.begin(), x.end(), -0.0f);  // the padding is +0
    std::vector<float> sums(static_cast<size_t>(sequences));
    ASSERT_TRUE(
        oracle_.Run(SequenceSumsArgs{x.data(), bounds.data(), sequences, sums.data()}).ok());
    DeviceBuffer<float> in(x, Offset(sizeof(float)));
    DeviceBuffer<int32_t> device_bounds(bounds);
    DeviceBuffer<float> out(sequences);
    const SequenceSumsArgs args = {in.data(), device_bounds.data(), sequences, out.data()};
    ASSERT_TRUE(cuda::Run(args, AnyStream()).ok());
    EXPECT_TRUE(out.GuardsIntact());
    EXPECT_TRUE(SameNumbers(out.CopyOut(), sums));
  }
}

TEST_F(OptimizerTest, SquareSums) {
  int cases = 0;
  for (; cases < Scaled(400) && !HasFailure(); ++cases) {
    const int64_t columns = Chance(4) ? 1 + Below(8) : Chance(8) ? 1 + Below(80000) : Width(30000);
    const int64_t rows = Rows(columns, 200000);
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", rows, " x ", columns));
    const std::vector<float> x = operands_.Floats(rows * columns, Chance(8));
    std::vector<double> expected(static_cast<size_t>(rows));
    ASSERT_TRUE(oracle_.Run(SquareSumsArgs{x.data(), rows, columns, expected.data()}).ok());
    EXPECT_TRUE(SameNumbers(SquareSums(x, rows, columns), expected));
  }
  std::printf("SquareSums: %d cases\n", cases);
}

// Controls: sums from left to right.
TEST_F(OptimizerTest, AWrongOrderShows) {
  const std::vector<float> x = RandomFloats(Family::kNormal, 8192, random_);
  float chain = 0.0f;
  double squares = 0.0;
  double chain64 = 0.0;
  std::vector<double> x64 = Doubles(8192);
  for (const float value : x) {
    chain = contract::Add(chain, value);
    squares = contract::Fma(static_cast<double>(value), static_cast<double>(value), squares);
  }
  for (double& value : x64) {
    value = 1.0 + 0x1p-30 * value;
    chain64 = contract::Add(chain64, value);
  }
  EXPECT_NE(Tree(x), chain);
  EXPECT_NE(Tree(x64), chain64);
  EXPECT_NE(SquareSums(x, 1, 8192)[0], squares);
}

// Parts of a parameter that begin and end anywhere. The control has another step's noise.
TEST_F(OptimizerTest, Dither) {
  int cases = 0;
  int64_t differ = 0;
  for (; cases < Scaled(300) && !HasFailure(); ++cases) {
    const int64_t count = Chance(16) ? 0 : 1 + Below(int64_t{1} << (1 + Below(18)));
    const std::vector<float> x = operands_.Floats(count, Chance(4));
    std::vector<Bf16> out(x.size());
    std::vector<Bf16> other(x.size());
    DitherArgs args = {.x = x.data(),
                       .count = count,
                       .step = static_cast<uint64_t>(1 + Below(100000)),
                       .moment = static_cast<uint32_t>(Below(2)),
                       .first = static_cast<uint64_t>(Chance(2) ? 8 * Below(int64_t{1} << 37)
                                                                : Below(int64_t{1} << 40)),
                       .out = other.data()};
    ++args.step;
    ASSERT_TRUE(oracle_.Run(args).ok());
    --args.step;
    args.out = out.data();
    ASSERT_TRUE(oracle_.Run(args).ok());
    DeviceBuffer<float> device_x(x, Offset(sizeof(float)));
    DeviceBuffer<Bf16> device_out(count, Offset(sizeof(Bf16)));
    DitherArgs device = args;
    device.x = device_x.data();
    device.out = device_out.data();
    ASSERT_TRUE(cuda::Run(device, AnyStream()).ok());
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", count, " from ", args.first));
    EXPECT_TRUE(SameBits(View(device_out.CopyOut()), View(out)));
    EXPECT_TRUE(device_out.GuardsIntact());
    for (size_t i = 0; i < out.size(); ++i) differ += out[i] != other[i] ? 1 : 0;
  }
  EXPECT_GT(differ, 0);
  std::printf("Dither: %d cases; %lld elements differ with another step's noise\n", cases,
              static_cast<long long>(differ));
}

// Two steps after each other, with and without the working copy; the control contracts a product
// and a sum.
TEST_F(OptimizerTest, AdamW) {
  int cases = 0;
  int64_t contracted = 0;
  for (; cases < Scaled(300) && !HasFailure(); ++cases) {
    const int64_t count = Chance(16) ? 0 : 1 + Below(int64_t{1} << (1 + Below(18)));
    const bool specials = Chance(8);
    std::vector<float> p = operands_.Floats(count, specials);
    std::vector<float> m = operands_.Floats(count, false);
    std::vector<float> v = operands_.Floats(count, false);
    for (float& value : v) value = std::abs(value);
    const std::vector<float> g = operands_.Floats(count, specials);
    std::vector<Bf16> working(p.size());
    AdamWArgs args = {.count = count,
                      .parameter = p.data(),
                      .m = m.data(),
                      .v = v.data(),
                      .gradient = g.data(),
                      .working = working.data(),
                      .step = {.keep = 1.0f - 1e-7f,
                               .beta1 = 0.9f,
                               .one_minus_beta1 = 0.1f,
                               .beta2 = 0.95f,
                               .one_minus_beta2 = 0.05f,
                               .rate = 1e-3f,
                               .root_scale = 3.1f,
                               .eps = Chance(8) ? 0.0f : 1e-8f,
                               .clip = Chance(2) ? 1.0f : 0.37f}};
    for (size_t i = 0; i < m.size(); ++i) {
      const float product =
          contract::Mul(args.step.one_minus_beta1, contract::Mul(g[i], args.step.clip));
      contracted += contract::Fma(args.step.beta1, m[i], product) !=
                            contract::Add(contract::Mul(args.step.beta1, m[i]), product)
                        ? 1
                        : 0;
    }
    const size_t offset = Offset(sizeof(float));
    DeviceBuffer<float> device_p(p, offset), device_m(m, offset), device_v(v, offset),
        device_g(g, offset);
    DeviceBuffer<Bf16> device_working(count, Offset(sizeof(Bf16)));
    AdamWArgs device = args;
    device.parameter = device_p.data();
    device.m = device_m.data();
    device.v = device_v.data();
    device.gradient = device_g.data();
    device.working = Chance(4) ? nullptr : device_working.data();
    for (int step = 0; step < 2; ++step) {
      ASSERT_TRUE(oracle_.Run(args).ok());
      ASSERT_TRUE(cuda::Run(device, AnyStream()).ok());
    }
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", count, ", offset ", offset));
    EXPECT_TRUE(SameNumbers(device_p.CopyOut(), p));
    EXPECT_TRUE(SameNumbers(device_m.CopyOut(), m));
    EXPECT_TRUE(SameNumbers(device_v.CopyOut(), v));
    if (device.working != nullptr) {
      EXPECT_TRUE(SameBits(View(device_working.CopyOut()), View(working)));
    }
    EXPECT_TRUE(device_p.GuardsIntact() && device_m.GuardsIntact() && device_v.GuardsIntact() &&
                device_working.GuardsIntact());
  }
  EXPECT_GT(contracted, 0);
  std::printf("AdamW: %d cases; %lld elements of m differ if contracted\n", cases,
              static_cast<long long>(contracted));
}

}  // namespace
}  // namespace isobit::cuda
