// Linear on every instruction set and thread count against the scalar definition, bit for bit.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/cpu/op_cases.h"

namespace isobit {
namespace {

using contract::LeafSum;
using testing_support::AllCpuOptions;
using testing_support::CancelLeaves;
using testing_support::Describe;
using testing_support::Family;
using testing_support::Guarded;
using testing_support::kFamilies;
using testing_support::PackedWeight;
using testing_support::Random;
using testing_support::RandomBf16;
using testing_support::RandomFloats;
using testing_support::SameBits;

struct Problem {
  LinearShape shape;
  int64_t m = 0;
  int64_t ldx = 0;
  int64_t ldy = 0;
  std::vector<Bf16> x = {};
  std::vector<Bf16> w = {};  // [n, k]
  std::vector<float> bias = {};
};

LinearShape ShapeOf(int64_t n, int64_t k, LeafSum sum) {
  LinearShape shape{.n = n, .k = k, .num_leaves = contract::kLeaves, .sum = sum};
  std::ranges::copy(contract::PlanColumns(k).bounds, shape.bounds);
  return shape;
}

// The columns of K that rank `rank` of `size` holds, cut in units of `unit`.
LinearShape RankShapeOf(int64_t n, int64_t k, int64_t unit, int rank, int size) {
  const contract::LeafPlan plan = contract::PlanLeaves(k, unit);
  const contract::LeafRange leaves = contract::LeavesOfRank(rank, size);
  LinearShape shape{.n = n, .num_leaves = leaves.end - leaves.begin, .sum = LeafSum::kTree};
  const int64_t first = plan.bounds[static_cast<size_t>(leaves.begin)];
  for (int l = 0; l <= shape.num_leaves; ++l) {
    shape.bounds[l] = *(plan.bounds.begin() + leaves.begin + l) - first;
  }
  shape.k = shape.bounds[shape.num_leaves];
  return shape;
}

Problem MakeProblem(const LinearShape& shape, int64_t m, Family family, Random& random) {
  Problem p{.shape = shape, .m = m, .ldx = shape.k + 5, .ldy = shape.n + 3};
  p.x = RandomBf16(family, m * p.ldx, random);
  p.w = RandomBf16(family, shape.n * shape.k, random);
  p.bias = RandomFloats(family, shape.n, random);
  return p;
}

template <typename T>
std::vector<T> RunLinear(Backend& ops, const Problem& p, bool bias) {
  const PackedWeight packed(ops, p.shape, p.w.data(), p.shape.k);
  Guarded<T> out(p.m * p.ldy);
  LinearArgs args{.x = p.x.data(),
                  .ldx = p.ldx,
                  .m = p.m,
                  .weight = packed.weight(),
                  .bias = bias ? p.bias.data() : nullptr,
                  .ldy = p.ldy};
  if constexpr (sizeof(T) == sizeof(float)) {
    args.fp32_out = out.data();
  } else {
    args.bf16_out = out.data();
  }
  EXPECT_TRUE(ops.Run(args).ok());
  EXPECT_TRUE(out.GuardsIntact());
  return {out.span().begin(), out.span().end()};
}

// All configurations, outputs and orders of one problem. The columns between n and ldy keep their
// poison in both, so a write beyond a row shows.
void ExpectOracleBits(const Problem& p) {
  for (const NumericsMode mode : {NumericsMode::kTree, NumericsMode::kVanilla}) {
    const std::unique_ptr<Backend> oracle = MakeOracleBackend(mode);
    const std::vector<float> fp32 = RunLinear<float>(*oracle, p, false);
    const std::vector<Bf16> bf16 = RunLinear<Bf16>(*oracle, p, true);
    for (CpuOptions options : AllCpuOptions()) {
      options.mode = mode;
      SCOPED_TRACE(absl::StrCat(Describe(options), ", mode ", static_cast<int>(mode), ", m ", p.m,
                                ", n ", p.shape.n, ", k ", p.shape.k));
      const std::unique_ptr<Backend> ops = MakeCpuBackend(options);
      EXPECT_TRUE(SameBits<float>(RunLinear<float>(*ops, p, false), fp32));
      EXPECT_TRUE(SameBits<Bf16>(RunLinear<Bf16>(*ops, p, true), bf16));
    }
  }
}

TEST(LinearTest, RaggedShapes) {
  Random random(1);
  for (const Family family : kFamilies) {
    for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{
             {1, 1, 1}, {1, 33, 15}, {3, 31, 17}, {2, 64, 100}, {5, 40, 129}, {1, 70, 576}}) {
      ExpectOracleBits(MakeProblem(ShapeOf(n, k, LeafSum::kChain), m, family, random));
      ExpectOracleBits(MakeProblem(ShapeOf(n, k, LeafSum::kTree), m, family, random));
    }
  }
}

TEST(LinearTest, RowCountsOfEveryVanillaSplit) {
  Random random(2);
  for (const int64_t m : {1, 4, 5, 16, 17, 65}) {
    ExpectOracleBits(MakeProblem(ShapeOf(36, 144, LeafSum::kChain), m, Family::kNormal, random));
  }
}

TEST(LinearTest, RankSubtrees) {
  Random random(3);
  // Nine heads with three KV heads on four ranks: some leaves are empty, and so are all leaves of
  // one rank.
  for (const int size : {1, 2, 4, 8}) {
    for (int rank = 0; rank < size; ++rank) {
      ExpectOracleBits(
          MakeProblem(RankShapeOf(37, 3 * 24, 24, rank, size), 3, Family::kNormal, random));
      ExpectOracleBits(MakeProblem(RankShapeOf(20, 203, 16, rank, size), 2, Family::kWide, random));
    }
  }
}

// Compared in bf16, where every NaN has one pattern: the payload of an fp32 sum of two NaNs is not
// defined.
TEST(LinearTest, NonFiniteOperands) {
  Random random(7);
  Problem p = MakeProblem(ShapeOf(70, 300, LeafSum::kTree), 6, Family::kWide, random);
  for (const Bf16 special : {0x7f80, 0xff80, 0x7fc0}) {
    p.x[random() % p.x.size()] = special;
    p.w[random() % p.w.size()] = special;
  }
  const auto expected = RunLinear<Bf16>(*MakeOracleBackend(), p, false);
  EXPECT_TRUE(std::ranges::count(expected, 0x7fff) > 0);
  for (const CpuOptions& options : AllCpuOptions()) {
    SCOPED_TRACE(Describe(options));
    EXPECT_TRUE(SameBits<Bf16>(RunLinear<Bf16>(*MakeCpuBackend(options), p, false), expected));
  }
}

TEST(LinearTest, AnEarlierCallLeavesNothingBehind) {
  Random random(6);
  const Problem p = MakeProblem(ShapeOf(40, 100, LeafSum::kChain), 2, Family::kNormal, random);
  Problem poison = MakeProblem(ShapeOf(40, 128, LeafSum::kChain), 3, Family::kNormal, random);
  std::ranges::fill(poison.x, Bf16{0x7fc0});
  poison.shape.bounds[1] = 5;  // ragged, so that x is copied
  const std::unique_ptr<Backend> ops = MakeCpuBackend({});
  const auto alone = RunLinear<float>(*ops, p, false);
  RunLinear<float>(*ops, poison, false);
  EXPECT_TRUE(SameBits<float>(RunLinear<float>(*ops, p, false), alone));
}

TEST(LinearTest, NoOutputs) {
  Random random(4);
  ExpectOracleBits(MakeProblem(ShapeOf(0, 64, LeafSum::kChain), 2, Family::kNormal, random));
}

Problem Cancelling(LeafSum sum) {
  Random random(5);
  Problem p = MakeProblem(ShapeOf(48, 512, sum), 6, Family::kNormal, random);
  p.ldx = p.shape.k;
  p.x.resize(static_cast<size_t>(p.m * p.ldx));
  CancelLeaves(p.shape, p.m, &p.x, &p.w);
  return p;
}

TEST(LinearTest, CancellingLeaves) {
  ExpectOracleBits(Cancelling(LeafSum::kChain));
  ExpectOracleBits(Cancelling(LeafSum::kTree));
}

// The control for all tests above: on these operands the two orders give different bits in most
// outputs, so a backend that adds leaves in the wrong order cannot pass.
TEST(LinearTest, CancellingLeavesTellChainFromTree) {
  const std::unique_ptr<Backend> oracle = MakeOracleBackend();
  const auto chain = RunLinear<float>(*oracle, Cancelling(LeafSum::kChain), false);
  const auto tree = RunLinear<float>(*oracle, Cancelling(LeafSum::kTree), false);
  const Problem p = Cancelling(LeafSum::kChain);
  int64_t unequal = 0;
  for (int64_t m = 0; m < p.m; ++m) {
    for (int64_t n = 0; n < p.shape.n; ++n) {
      const auto i = static_cast<size_t>(m * p.ldy + n);
      unequal += std::bit_cast<uint32_t>(chain[i]) != std::bit_cast<uint32_t>(tree[i]);
    }
  }
  EXPECT_GT(unequal, p.m * p.shape.n / 2);
}

TEST(LinearTest, VanillaDependsOnTheBatch) {
  Problem p = Cancelling(LeafSum::kChain);
  const std::unique_ptr<Backend> ops = MakeCpuBackend({.mode = NumericsMode::kVanilla});
  const std::vector<float> crowd = RunLinear<float>(*ops, p, false);
  p.m = 1;
  const std::vector<float> alone = RunLinear<float>(*ops, p, false);
  EXPECT_FALSE(SameBits<float>(alone, std::span(crowd).first(alone.size())));
}

}  // namespace
}  // namespace isobit
