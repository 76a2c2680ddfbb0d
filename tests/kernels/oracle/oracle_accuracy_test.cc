// Compares the oracle with float64: its definition is that of a linear layer, an RMSNorm and an
// attention, as accurate as bf16 outputs allow.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/attention.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/portable.h"
#include "kernels/oracle/oracle_backend.h"

namespace isobit {
namespace {

using contract::Bf16ToFloat;
using contract::FloatToBf16;

constexpr double kBf16Error = 0x1p-8;  // relative, half an ulp with a little room

std::vector<Bf16> Normal(size_t n, uint64_t seed, float scale = 1.0f) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<Bf16> values(n);
  for (Bf16& value : values) value = FloatToBf16(scale * normal(random));
  return values;
}

TEST(OracleAccuracyTest, Linear) {
  constexpr int64_t kM = 3;
  constexpr int64_t kN = 20;
  constexpr int64_t kK = 1000;
  const std::vector<Bf16> x = Normal(kM * kK, 1);
  const std::vector<Bf16> w = Normal(kN * kK, 2);
  const std::unique_ptr<Backend> ops = MakeOracleBackend();
  for (const contract::LeafSum sum : {contract::LeafSum::kChain, contract::LeafSum::kTree}) {
    LinearWeight weight;
    weight.shape = {.n = kN, .k = kK, .num_leaves = contract::kLeaves, .sum = sum};
    std::ranges::copy(contract::PlanColumns(kK).bounds, weight.shape.bounds);
    std::vector<std::byte> packed(ops->packer().PackedBytes(weight.shape));
    ops->packer().Pack(weight.shape, w.data(), kK, packed.data());
    weight.packed = packed.data();
    std::vector<float> y(kM * kN);
    ASSERT_TRUE(ops->Run(LinearArgs{.x = x.data(),
                                    .ldx = kK,
                                    .m = kM,
                                    .weight = weight,
                                    .fp32_out = y.data(),
                                    .ldy = kN})
                    .ok());
    for (size_t m = 0; m < kM; ++m) {
      for (size_t n = 0; n < kN; ++n) {
        double exact = 0;
        double magnitude = 0;
        for (size_t k = 0; k < kK; ++k) {
          const double product = static_cast<double>(Bf16ToFloat(x[m * kK + k])) *
                                 static_cast<double>(Bf16ToFloat(w[n * kK + k]));
          exact += product;
          magnitude += std::abs(product);
        }
        EXPECT_NEAR(y[m * kN + n], exact, 1e-6 * magnitude);
      }
    }
  }
}

TEST(OracleAccuracyTest, RmsNorm) {
  constexpr int64_t kHidden = 301;
  std::vector<Bf16> x = Normal(kHidden, 3, 5.0f);
  const std::vector<Bf16> weight = Normal(kHidden, 4);
  std::vector<Bf16> out(kHidden);
  ASSERT_TRUE(MakeOracleBackend()
                  ->Run(RmsNormArgs{.residual = x.data(),
                                    .weight = weight.data(),
                                    .out = out.data(),
                                    .rows = 1,
                                    .hidden = kHidden,
                                    .eps = 1e-6f})
                  .ok());
  double squares = 0;
  for (const Bf16 value : x) squares += std::pow(Bf16ToFloat(value), 2);
  const double inverse = 1.0 / std::sqrt(squares / kHidden + 1e-6);
  for (size_t i = 0; i < kHidden; ++i) {
    const double exact = Bf16ToFloat(x[i]) * inverse * Bf16ToFloat(weight[i]);
    EXPECT_NEAR(Bf16ToFloat(out[i]), exact, 2 * kBf16Error * std::abs(exact));
  }
}

TEST(OracleAccuracyTest, SwiGlu) {
  constexpr int64_t kColumns = 200;
  const std::vector<Bf16> gate_up = Normal(2 * kColumns, 5, 3.0f);
  std::vector<Bf16> out(kColumns);
  ASSERT_TRUE(MakeOracleBackend()
                  ->Run(SwiGluArgs{
                      .gate_up = gate_up.data(), .out = out.data(), .rows = 1, .columns = kColumns})
                  .ok());
  for (size_t i = 0; i < kColumns; ++i) {
    const double gate = Bf16ToFloat(gate_up[i]);
    const double exact = gate / (1 + std::exp(-gate)) * Bf16ToFloat(gate_up[kColumns + i]);
    EXPECT_NEAR(Bf16ToFloat(out[i]), exact, kBf16Error * std::abs(exact));
  }
}

// One prompt of 600 positions (two splits), two query heads on one KV head, with and without a
// window.
TEST(OracleAccuracyTest, Attention) {
  constexpr int32_t kHeads = 2;
  constexpr int32_t kDim = 32;
  constexpr int64_t kRows = 600;
  std::vector<Bf16> q = Normal(kRows * kHeads * kDim, 6);
  std::vector<Bf16> k = Normal(kRows * kDim, 7);
  std::vector<Bf16> v = Normal(kRows * kDim, 8);
  const int32_t page = 0;
  const SequenceRows sequence{
      .first_row = 0, .num_rows = kRows, .first_position = 0, .pages = &page};
  const PagedKv kv{k.data(), v.data(), kRows, 1, kDim};
  for (const int64_t window : {0, 50}) {
    std::vector<Bf16> out(q.size());
    ASSERT_TRUE(MakeOracleBackend()
                    ->Run(AttentionArgs{.q = q.data(),
                                        .ldq = kHeads * kDim,
                                        .heads = kHeads,
                                        .sequences = {.host = {&sequence, 1}},
                                        .kv = kv,
                                        .scale = contract::AttentionScale(kDim),
                                        .window = window,
                                        .out = out.data(),
                                        .ldo = kHeads * kDim})
                    .ok());
    for (const size_t row : {0, 1, 49, 50, 127, 128, 511, 512, 599}) {
      const size_t first = window != 0 && row >= 50 ? row - 49 : 0;
      for (size_t h = 0; h < kHeads; ++h) {
        const Bf16* query = q.data() + (row * kHeads + h) * kDim;
        std::vector<double> weights;
        double sum = 0;
        for (size_t j = first; j <= row; ++j) {
          double score = 0;
          for (size_t e = 0; e < kDim; ++e) {
            score += Bf16ToFloat(query[e]) * Bf16ToFloat(k[j * kDim + e]);
          }
          weights.push_back(std::exp(score / std::sqrt(kDim)));
          sum += weights.back();
        }
        for (size_t e = 0; e < kDim; ++e) {
          double exact = 0;
          double magnitude = 0;
          for (size_t j = first; j <= row; ++j) {
            const double term = weights[j - first] / sum * Bf16ToFloat(v[j * kDim + e]);
            exact += term;
            magnitude += std::abs(term);
          }
          EXPECT_NEAR(Bf16ToFloat(out[(row * kHeads + h) * kDim + e]), exact,
                      2 * kBf16Error * magnitude)
              << "row " << row << ", window " << window;
        }
      }
    }
  }
}

}  // namespace
}  // namespace isobit
