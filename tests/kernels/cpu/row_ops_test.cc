// Embedding, RmsNorm, SwiGlu and Reduce on every instruction set and thread count against the
// scalar definition, bit for bit.
#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/cpu/op_cases.h"

namespace isobit {
namespace {

using testing_support::AllCpuOptions;
using testing_support::Describe;
using testing_support::Family;
using testing_support::Guarded;
using testing_support::kFamilies;
using testing_support::Random;
using testing_support::RandomBf16;
using testing_support::RandomFloats;
using testing_support::SameBits;

constexpr int64_t kWidths[] = {1, 3, 4, 15, 64, 100, 127, 128, 131, 576, 1000};

// Runs `body(ops)` -> outputs on the oracle and on every backend, and compares.
template <typename Body>
void ExpectOracleBits(const Body& body, NumericsMode mode = NumericsMode::kTree) {
  const std::unique_ptr<Backend> oracle = MakeOracleBackend(mode);
  const auto expected = body(*oracle);
  for (CpuOptions options : AllCpuOptions()) {
    options.mode = mode;
    SCOPED_TRACE(Describe(options));
    const std::unique_ptr<Backend> ops = MakeCpuBackend(options);
    const auto actual = body(*ops);
    using Value = typename decltype(actual)::value_type;
    EXPECT_TRUE(SameBits<Value>(actual, expected));
  }
}

TEST(RowOpsTest, Embedding) {
  Random random(1);
  const std::vector<Bf16> table = RandomBf16(Family::kNormal, 50 * 33, random);
  const std::vector<int32_t> ids = {49, 0, 7, 7};
  ExpectOracleBits([&](Backend& ops) {
    Guarded<Bf16> out(4 * 33);
    EXPECT_TRUE(ops.Run(EmbeddingArgs{.ids = ids.data(),
                                      .rows = 4,
                                      .table = table.data(),
                                      .hidden = 33,
                                      .out = out.data()})
                    .ok());
    EXPECT_TRUE(out.GuardsIntact());
    return std::vector<Bf16>(out.span().begin(), out.span().end());
  });
}

TEST(RowOpsTest, RmsNorm) {
  Random random(2);
  for (const Family family : kFamilies) {
    for (const int64_t hidden : kWidths) {
      for (const int variant : {0, 1, 2}) {  // alone; after a sum; after a sum and a bias
        SCOPED_TRACE(absl::StrCat("hidden ", hidden, ", variant ", variant));
        const int64_t rows = 11;
        const std::vector<Bf16> residual = RandomBf16(family, rows * hidden, random);
        const std::vector<float> sum = RandomFloats(family, rows * hidden, random);
        const std::vector<float> bias = RandomFloats(family, hidden, random);
        const std::vector<Bf16> weight = RandomBf16(family, hidden, random);
        ExpectOracleBits([&](Backend& ops) {
          Guarded<Bf16> stream(rows * hidden);
          Guarded<Bf16> out(rows * hidden);
          std::ranges::copy(residual, stream.data());
          EXPECT_TRUE(ops.Run(RmsNormArgs{.residual = stream.data(),
                                          .sum = variant > 0 ? sum.data() : nullptr,
                                          .bias = variant > 1 ? bias.data() : nullptr,
                                          .weight = weight.data(),
                                          .out = out.data(),
                                          .rows = rows,
                                          .hidden = hidden,
                                          .eps = 1e-5f})
                          .ok());
          EXPECT_TRUE(stream.GuardsIntact() && out.GuardsIntact());
          std::vector<Bf16> both(stream.span().begin(), stream.span().end());
          both.insert(both.end(), out.span().begin(), out.span().end());
          return both;
        });
      }
    }
  }
}

TEST(RowOpsTest, SwiGlu) {
  Random random(3);
  for (const Family family : kFamilies) {
    for (const int64_t columns : kWidths) {
      const int64_t rows = 9;
      const std::vector<Bf16> gate_up = RandomBf16(family, rows * 2 * columns, random);
      ExpectOracleBits([&](Backend& ops) {
        Guarded<Bf16> out(rows * columns);
        EXPECT_TRUE(
            ops
                .Run(SwiGluArgs{
                    .gate_up = gate_up.data(), .out = out.data(), .rows = rows, .columns = columns})
                .ok());
        EXPECT_TRUE(out.GuardsIntact());
        return std::vector<Bf16>(out.span().begin(), out.span().end());
      });
    }
  }
}

class ReduceTest : public testing::Test {
 protected:
  static constexpr int64_t kCount = 40000;

  // Elements [begin, end) of the sum over `ranks` partials; the rest keeps its poison.
  static std::vector<float> Sum(Backend& ops, int ranks, int64_t begin, int64_t end) {
    Random random(4);
    std::vector<std::vector<float>> partials;
    std::vector<const float*> pointers;
    for (int r = 0; r < ranks; ++r) {
      partials.push_back(RandomFloats(Family::kWide, kCount, random));
    }
    for (const std::vector<float>& partial : partials) pointers.push_back(partial.data());
    Guarded<float> out(kCount);
    EXPECT_TRUE(ops.Run(ReduceArgs{.partials = pointers.data(),
                                   .num_ranks = ranks,
                                   .begin = begin,
                                   .end = end,
                                   .count = kCount,
                                   .out = out.data()})
                    .ok());
    EXPECT_TRUE(out.GuardsIntact());
    return {out.span().begin(), out.span().end()};
  }
};

TEST_F(ReduceTest, HasTheOraclesBits) {
  for (const NumericsMode mode :
       {NumericsMode::kTree, NumericsMode::kBatchInvariant, NumericsMode::kVanilla}) {
    for (const int ranks : {1, 2, 4, 8}) {
      SCOPED_TRACE(absl::StrCat("ranks ", ranks, ", mode ", static_cast<int>(mode)));
      ExpectOracleBits([&](Backend& ops) { return Sum(ops, ranks, 0, kCount); }, mode);
      ExpectOracleBits([&](Backend& ops) { return Sum(ops, ranks, 4999, 30001); }, mode);
    }
  }
}

TEST_F(ReduceTest, EveryModeHasAnOrderOfItsOwn) {
  const auto sum = [](NumericsMode mode) {
    return Sum(*MakeCpuBackend({.mode = mode}), 4, 0, kCount);
  };
  const std::vector<float> tree = sum(NumericsMode::kTree);
  const std::vector<float> chain = sum(NumericsMode::kBatchInvariant);
  const std::vector<float> ring = sum(NumericsMode::kVanilla);
  EXPECT_FALSE(SameBits<float>(tree, chain));
  EXPECT_FALSE(SameBits<float>(tree, ring));
  EXPECT_FALSE(SameBits<float>(chain, ring));
}

}  // namespace
}  // namespace isobit
