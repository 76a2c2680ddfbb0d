// The linear layer on row-major weights on a GPU against the CPU backend's layer, bit for bit:
// every tile, random shapes, parts, leaves, outputs and alignments.
#include <array>
#include <cstring>

#include "absl/strings/str_format.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/linear/stacked_linear.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/cuda/linear/product_case.h"

namespace isobit::cuda {
namespace {

using contract::LeafSum;
using testing_support::Below;
using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::HostMatrix;
using testing_support::kFamilies;
using testing_support::List;
using testing_support::OnH200;
using testing_support::PackedWeight;
using testing_support::ProductCpu;
using testing_support::Random;
using testing_support::RandomBf16;
using testing_support::RandomFloats;
using testing_support::RandomLd;
using testing_support::RandomMatrix;
using testing_support::RandomParts;
using testing_support::SameBits;
using testing_support::Scaled;

enum class Output { kBf16, kFp32, kResidual };

struct Case {
  std::vector<int64_t> parts;
  HostMatrix x;       // [m, columns]
  HostMatrix weight;  // [n, columns]
  contract::LeafPlan leaves = {};
  LeafSum sum = LeafSum::kChain;
  Output output = Output::kBf16;
  std::vector<float> bias = {};
  std::vector<Bf16> residual = {};
  size_t offset = 0;  // bytes past an aligned address, of the output

  std::string Description() const {
    return absl::StrFormat("m %d, parts %s, leaves %s, %s, output %d%s, ldx %d, offset %d", x.rows,
                           List(parts), List({leaves.bounds.begin(), leaves.bounds.end()}),
                           sum == LeafSum::kTree ? "tree" : "chain", static_cast<int>(output),
                           bias.empty() ? "" : " + bias", x.ld, offset);
  }
};

// Bits of the output; bf16 in the low half.
using Bits = std::vector<uint32_t>;
Bits BitsOf(const std::vector<float>& values) {
  Bits bits;
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}
Bits BitsOf(const std::vector<Bf16>& values) { return {values.begin(), values.end()}; }

// The sums with the bias but before any rounding.
std::vector<float> Sums(const Case& c, LeafSum sum, bool bias) {
  LinearShape shape = {
      .n = c.weight.rows, .k = c.weight.columns, .num_leaves = contract::kLeaves, .sum = sum};
  std::ranges::copy(c.leaves.bounds, shape.bounds);
  const PackedWeight packed(ProductCpu(), shape, c.weight.values.data(), c.weight.columns);
  std::vector<float> y(static_cast<size_t>(c.x.rows * shape.n));
  LinearArgs args;
  args.x = c.x.values.data();
  args.ldx = c.x.ld;
  args.m = c.x.rows;
  args.weight = packed.weight();
  args.bias = bias && !c.bias.empty() ? c.bias.data() : nullptr;
  args.fp32_out = y.data();
  args.ldy = shape.n;
  EXPECT_TRUE(ProductCpu().Run(args).ok());
  return y;
}

Bits Expected(const Case& c) {
  const std::vector<float> sums = Sums(c, c.sum, c.output != Output::kResidual);
  if (c.output == Output::kFp32) return BitsOf(sums);
  std::vector<Bf16> y;
  for (size_t i = 0; i < sums.size(); ++i) {
    const float bias = c.bias.empty() ? 0.0f : c.bias[i % static_cast<size_t>(c.weight.rows)];
    y.push_back(c.output == Output::kBf16 ? contract::FloatToBf16(sums[i])
                                          : contract::AddResidual(c.residual[i], sums[i], bias));
  }
  return BitsOf(y);
}

StackedLinearArgs ArgsOf(const Case& c, const Bf16* x, const Bf16* weight, const float* bias) {
  StackedLinearArgs args;
  args.x = x;
  args.ldx = c.x.ld;
  args.m = c.x.rows;
  args.weight.parts = static_cast<int>(c.parts.size());
  args.weight.columns = c.weight.columns;
  for (size_t i = 0; i < c.parts.size(); ++i) {
    args.weight.data[i] = weight;
    args.weight.rows[i] = c.parts[i];
    weight += c.parts[i] * c.weight.columns;
  }
  args.leaves = c.leaves;
  args.sum = c.sum;
  args.bias = c.bias.empty() ? nullptr : bias;
  return args;
}

Case RandomCase(Random& random) {
  const bool mappable = Below(4, random) != 0;
  constexpr int64_t kUnits[] = {64, 8, 1};
  Case c;
  c.parts = RandomParts(1 + Below(600, random), mappable ? kUnits[Below(2, random)] : 1, random);
  int64_t n = 0;
  for (const int64_t rows : c.parts) n += rows;
  switch (Below(mappable ? 4 : 5, random)) {
    case 0:
      c.leaves = contract::PlanColumns(512 * (1 + Below(4, random)));
      break;
    case 1:
      c.leaves = contract::PlanColumns(8 * (1 + Below(150, random)));
      break;
    case 2:
      c.leaves = contract::PlanKvHeads(1 + Below(10, random), 16 * (1 + Below(9, random)));
      break;
    case 3:
      c.leaves = contract::PlanColumns(64 * (1 + Below(20, random)));
      break;
    default:
      c.leaves = contract::PlanKvHeads(1 + Below(10, random), 1 + Below(90, random));
  }
  const int64_t columns = c.leaves.bounds.back();
  const int64_t m = 1 + Below(400, random);
  const Family family = kFamilies[Below(std::size(kFamilies), random)];
  c.x = RandomMatrix(family, m, columns, RandomLd(columns, mappable, random), random);
  c.weight = RandomMatrix(family, n, columns, columns, random);
  c.sum = Below(2, random) == 0 ? LeafSum::kTree : LeafSum::kChain;
  c.output = static_cast<Output>(Below(3, random));
  if (Below(2, random) == 0) c.bias = RandomFloats(family, n, random);
  if (c.output == Output::kResidual) c.residual = RandomBf16(family, m * n, random);
  c.offset = (c.output == Output::kFp32 ? 4 : 2) * static_cast<size_t>(Below(3, random));
  return c;
}

// Runs every kernel that computes the case.
template <typename T>
void ExpectBits(const Case& c) {
  const Bits expected = Expected(c);
  DeviceBuffer<Bf16> x(c.x.values);
  DeviceBuffer<Bf16> weight(c.weight.values);
  DeviceBuffer<float> bias(c.bias);
  DeviceBuffer<T> y(static_cast<int64_t>(expected.size()), c.offset);
  DeviceBuffer<Bf16> residual(c.residual, c.offset);
  StackedLinearArgs args = ArgsOf(c, x.data(), weight.data(), bias.data());
  if constexpr (sizeof(T) == 4) {
    args.fp32_out = y.data();
  } else {
    args.bf16_out = y.data();
  }
  if (!c.residual.empty()) args.residual = residual.data();
  const auto expect = [&](const std::string& how, const absl::Status& status) {
    SCOPED_TRACE(absl::StrCat(how, ": ", c.Description()));
    ASSERT_TRUE(status.ok()) << status.message();
    const Bits bits = BitsOf(y.CopyOut());
    ASSERT_TRUE(SameBits(std::span<const uint32_t>(bits), std::span<const uint32_t>(expected)));
    ASSERT_TRUE(y.GuardsIntact());
    y.Poison();
  };
  expect("slow kernel", LaunchGeneralStackedLinear(args, OnH200()));
  for (const ProductSchedule& tile : kChainTiles) {
    if (tile.cluster > 1 && std::getenv("ISOBIT_TEST_WITHOUT_CLUSTERS") != nullptr) continue;
    const absl::Status status = LaunchStackedLinearAs(tile, args, OnH200());
    if (absl::IsInvalidArgument(status)) continue;
    expect(absl::StrCat(tile.columns, " columns, cluster ", tile.cluster), status);
    if (testing::Test::HasFatalFailure()) return;
  }
  expect("chosen", cuda::Run(args, OnH200()));
  if constexpr (sizeof(T) == 2) {
    if (c.residual.empty()) return;
    args.bf16_out = residual.data();  // in place
    ASSERT_TRUE(cuda::Run(args, OnH200()).ok());
    const Bits bits = BitsOf(residual.CopyOut());
    EXPECT_TRUE(SameBits(std::span<const uint32_t>(bits), std::span<const uint32_t>(expected)));
  }
}
void ExpectBits(const Case& c) {
  c.output == Output::kFp32 ? ExpectBits<float>(c) : ExpectBits<Bf16>(c);
}

using StackedLinearTest = testing_support::GpuTest;

TEST_F(StackedLinearTest, RandomCases) {
  Random random(1);
  for (int i = 0; i < Scaled(250) && !HasFailure(); ++i) ExpectBits(RandomCase(random));
}

// More tiles than run at once, parts that end inside a tile, and a ring that wraps around.
TEST_F(StackedLinearTest, LargerThanAWave) {
  Random random(2);
  for (const LeafSum sum : {LeafSum::kChain, LeafSum::kTree}) {
    for (const Output output : {Output::kBf16, Output::kFp32, Output::kResidual}) {
      for (const int64_t columns : {1024, 576}) {
        Case c = {.parts = {1000, 520, 584}, .leaves = contract::PlanColumns(columns), .sum = sum};
        c.output = output;
        c.x = RandomMatrix(Family::kNormal, 1300, columns, columns, random);
        c.weight = RandomMatrix(Family::kNormal, 2104, columns, columns, random);
        c.bias = RandomFloats(Family::kNormal, 2104, random);
        if (output == Output::kResidual) {
          c.residual = RandomBf16(Family::kNormal, 1300 * 2104, random);
        }
        ExpectBits(c);
        if (HasFailure()) return;
      }
    }
  }
}

// ---- Controls, which need no GPU

TEST(StackedLinearControlTest, ReferenceIsTheOracle) {
  Random random(3);
  OracleBackend oracle;
  for (int i = 0; i < 8; ++i) {
    Case c = RandomCase(random);
    c.x = RandomMatrix(Family::kWide, 2, c.weight.columns, c.weight.columns, random);
    c.output = static_cast<Output>(i % 3);
    const auto count = static_cast<size_t>(2 * c.weight.rows);
    c.residual = c.output == Output::kResidual
                     ? RandomBf16(Family::kNormal, 2 * c.weight.rows, random)
                     : std::vector<Bf16>();
    StackedLinearArgs args = ArgsOf(c, c.x.values.data(), c.weight.values.data(), c.bias.data());
    args.residual = c.residual.empty() ? nullptr : c.residual.data();
    std::vector<float> fp32(count);
    std::vector<Bf16> bf16(count);
    if (c.output == Output::kFp32) {
      args.fp32_out = fp32.data();
    } else {
      args.bf16_out = bf16.data();
    }
    ASSERT_TRUE(oracle.Run(args).ok());
    const Bits bits = c.output == Output::kFp32 ? BitsOf(fp32) : BitsOf(bf16);
    const Bits expected = Expected(c);
    EXPECT_TRUE(SameBits(std::span<const uint32_t>(bits), std::span<const uint32_t>(expected)));
  }
}

// On data such as the tests', the other combination of leaves gives other bits.
TEST(StackedLinearControlTest, OrdersDiffer) {
  Random random(4);
  Case c = {.parts = {128}, .leaves = contract::PlanColumns(1024)};
  c.x = RandomMatrix(Family::kNormal, 100, 1024, 1024, random);
  c.weight = RandomMatrix(Family::kNormal, 128, 1024, 1024, random);
  const Bits chain = BitsOf(Sums(c, LeafSum::kChain, false));
  const Bits tree = BitsOf(Sums(c, LeafSum::kTree, false));
  int64_t unequal = 0;
  for (size_t i = 0; i < chain.size(); ++i) unequal += chain[i] != tree[i];
  EXPECT_GT(unequal, 1000);
}

}  // namespace
}  // namespace isobit::cuda
