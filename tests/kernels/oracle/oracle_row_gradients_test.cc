// The gradients of products and row functions against float64: central differences of the function,
// or its exact sums. Then the optimizer against its formulas in float64.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/rope.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/oracle/gradient_cases.h"

namespace isobit {
namespace {

using testing_support::kRoundedOnce;
using testing_support::NormalBf16;
using testing_support::NormalFloats;
using testing_support::Random;
using testing_support::RelativeError;
using testing_support::Slopes;
using testing_support::ToDoubles;

constexpr double kEps = 1e-3;  // large enough to matter

// x / sqrt(mean of squares + eps) * weight, for x [begin, begin + n) of a vector
std::vector<double> Norm(const double* x, const std::vector<double>& weight) {
  double squares = 0;
  const size_t n = weight.size();
  for (size_t i = 0; i < n; ++i) squares += x[i] * x[i];
  const double inverse = 1 / std::sqrt(squares / static_cast<double>(n) + kEps);
  std::vector<double> y(n);
  for (size_t i = 0; i < n; ++i) y[i] = x[i] * inverse * weight[i];
  return y;
}

double Dot(const std::vector<double>& a, const double* b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

TEST(OracleGradientsTest, Products) {
  constexpr int64_t kRows = 150;
  constexpr int64_t kColumns = 37;
  const std::vector<int64_t> part_rows = {16, 9, 20};
  constexpr int64_t kN = 45;
  const std::vector<int64_t> packs = {0, 70, 70, 101, 150};
  Random random(1);
  const std::vector<Bf16> x = NormalBf16(kRows * kColumns, random);
  const std::vector<Bf16> dy = NormalBf16(kRows * kN, random);
  const std::vector<Bf16> w = NormalBf16(kN * kColumns, random);
  std::vector<Bf16> dx(x.size());
  std::vector<float> dw(w.size());
  std::vector<float> db(kN);
  InputGradientArgs input = {
      .dy = dy.data(), .lddy = kN, .m = kRows, .weight = {}, .dx = dx.data()};
  WeightGradientArgs weight;
  weight.dy = dy.data();
  weight.lddy = kN;
  weight.x = x.data();
  weight.ldx = kColumns;
  weight.packs = packs;
  weight.columns = kColumns;
  input.weight.columns = kColumns;
  input.weight.parts = weight.parts = 3;
  int64_t row = 0;
  for (size_t i = 0; i < 3; ++i) {
    input.weight.data[i] = w.data() + row * kColumns;
    input.weight.rows[i] = weight.part_rows[i] = part_rows[i];
    weight.dw[i] = dw.data() + row * kColumns;
    row += part_rows[i];
  }
  OracleBackend ops;
  ASSERT_TRUE(ops.Run(input).ok());
  ASSERT_TRUE(ops.Run(weight).ok());
  ASSERT_TRUE(ops.Run(ColumnSumsArgs{dy.data(), kN, kN, packs, db.data()}).ok());

  const std::vector<double> x64 = ToDoubles(x);
  const std::vector<double> dy64 = ToDoubles(dy);
  const std::vector<double> w64 = ToDoubles(w);
  std::vector<double> dx64(x.size());
  std::vector<double> dw64(w.size());
  std::vector<double> db64(kN);
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t n = 0; n < kN; ++n) {
      db64[n] += dy64[r * kN + n];
      for (size_t k = 0; k < kColumns; ++k) {
        dx64[r * kColumns + k] += dy64[r * kN + n] * w64[n * kColumns + k];
        dw64[n * kColumns + k] += dy64[r * kN + n] * x64[r * kColumns + k];
      }
    }
  }
  EXPECT_LT(RelativeError(ToDoubles(dx), dx64), kRoundedOnce);
  EXPECT_LT(RelativeError(ToDoubles(dw), dw64), 1e-6);
  EXPECT_LT(RelativeError(ToDoubles(db), db64), 1e-6);
}

TEST(OracleGradientsTest, RmsNorm) {
  constexpr size_t kRows = 70;
  constexpr size_t kColumns = 37;
  const std::vector<int64_t> packs = {0, 69, 70};
  Random random(2);
  const std::vector<Bf16> x = NormalBf16(kRows * kColumns, random, 0.1f);
  const std::vector<Bf16> weight = NormalBf16(kColumns, random);
  const std::vector<Bf16> dy = NormalBf16(x.size(), random);
  std::vector<Bf16> dx(x.size());
  std::vector<float> dw(kColumns);
  ASSERT_TRUE(OracleBackend()
                  .Run(RmsNormGradientArgs{x.data(), weight.data(), dy.data(), kColumns,
                                           static_cast<float>(kEps), packs, dx.data(), dw.data()})
                  .ok());
  const std::vector<double> dy64 = ToDoubles(dy);
  const auto loss = [&](const std::vector<double>& at, const std::vector<double>& w) {
    double sum = 0;
    for (size_t r = 0; r < kRows; ++r) {
      sum += Dot(Norm(at.data() + r * kColumns, w), dy64.data() + r * kColumns);
    }
    return sum;
  };
  const std::vector<double> x64 = ToDoubles(x);
  const std::vector<double> w64 = ToDoubles(weight);
  const auto of_x = [&](const std::vector<double>& at) { return loss(at, w64); };
  const auto of_w = [&](const std::vector<double>& at) { return loss(x64, at); };
  EXPECT_LT(RelativeError(ToDoubles(dx), Slopes(of_x, x64, 11), 11), kRoundedOnce);
  EXPECT_LT(RelativeError(ToDoubles(dw), Slopes(of_w, w64)), kRoundedOnce);
}

TEST(OracleGradientsTest, QkvHeads) {
  constexpr size_t kRows = 5;
  constexpr int32_t kHeads = 3;
  constexpr int32_t kKvHeads = 2;
  constexpr size_t kDim = 12;
  constexpr size_t kLd = (kHeads + 2 * kKvHeads) * kDim;
  const std::vector<int64_t> packs = {0, 2, 5};
  const std::vector<int32_t> positions = {0, 1, 0, 1, 30};
  Random random(3);
  const std::vector<Bf16> qkv = NormalBf16(kRows * kLd, random, 0.1f);
  const std::vector<Bf16> q_norm = NormalBf16(kDim, random);
  const std::vector<Bf16> k_norm = NormalBf16(kDim, random);
  const std::vector<Bf16> dq = NormalBf16(kRows * kHeads * kDim, random);
  const std::vector<Bf16> dk = NormalBf16(kRows * kKvHeads * kDim, random);
  const std::vector<Bf16> dv = NormalBf16(kRows * kKvHeads * kDim, random);
  const contract::RopeTable rope = contract::MakeRopeTable(31, kDim, 10000, {});
  for (const bool with_norms : {false, true}) {
    std::vector<Bf16> q(dq.size());
    std::vector<Bf16> k(dk.size());
    std::vector<Bf16> v(dv.size());
    std::vector<Bf16> dqkv(qkv.size());
    std::vector<float> dq_norm(kDim);
    std::vector<float> dk_norm(kDim);
    TrainingQkvArgs forward;
    forward.qkv = qkv.data();
    forward.rows = kRows;
    forward.positions = positions.data();
    forward.heads = kHeads;
    forward.kv_heads = kKvHeads;
    forward.head_dim = kDim;
    forward.q_norm = with_norms ? q_norm.data() : nullptr;
    forward.k_norm = with_norms ? k_norm.data() : nullptr;
    forward.eps = static_cast<float>(kEps);
    forward.cosine = rope.cosine.data();
    forward.sine = rope.sine.data();
    forward.q = q.data();
    forward.k = k.data();
    forward.v = v.data();
    OracleBackend ops;
    ASSERT_TRUE(ops.Run(forward).ok());
    ASSERT_TRUE(ops.Run(QkvGradientArgs{forward, dq.data(), dk.data(), dv.data(), packs,
                                        dqkv.data(), dq_norm.data(), dk_norm.data()})
                    .ok());

    // The rotated heads [rows][heads][dim] of columns that begin at `first`.
    const auto heads_of = [&](const std::vector<double>& at, size_t first, size_t heads,
                              const std::vector<double>& norm) {
      std::vector<double> out;
      for (size_t i = 0; i < kRows * heads; ++i) {
        const double* x = at.data() + i / heads * kLd + first + i % heads * kDim;
        std::vector<double> y(x, x + kDim);
        if (with_norms) y = Norm(x, norm);
        for (size_t e = 0; e < kDim; ++e) {
          const size_t angle = static_cast<size_t>(positions[i / heads]) * (kDim / 2) + e % 6;
          const double other = e < kDim / 2 ? -y[e + kDim / 2] : y[e - kDim / 2];
          out.push_back(y[e] * static_cast<double>(rope.cosine[angle]) +
                        other * static_cast<double>(rope.sine[angle]));
        }
      }
      return out;
    };
    const std::vector<double> dq64 = ToDoubles(dq);
    const std::vector<double> dk64 = ToDoubles(dk);
    const std::vector<double> dv64 = ToDoubles(dv);
    const std::vector<double> qn = ToDoubles(q_norm);
    const std::vector<double> kn = ToDoubles(k_norm);
    const std::vector<double> x = ToDoubles(qkv);
    const size_t k_column = kHeads * kDim;
    EXPECT_LT(RelativeError(ToDoubles(q), heads_of(x, 0, kHeads, qn)), 2 * kRoundedOnce);
    EXPECT_LT(RelativeError(ToDoubles(k), heads_of(x, k_column, kKvHeads, kn)), 2 * kRoundedOnce);
    const auto loss = [&](const std::vector<double>& at) {
      double sum = Dot(heads_of(at, 0, kHeads, qn), dq64.data()) +
                   Dot(heads_of(at, k_column, kKvHeads, kn), dk64.data());
      for (size_t i = 0; i < dv64.size(); ++i) {
        const size_t width = kKvHeads * kDim;
        sum += dv64[i] * at[i / width * kLd + k_column + width + i % width];
      }
      return sum;
    };
    EXPECT_LT(RelativeError(ToDoubles(dqkv), Slopes(loss, x)), 2 * kRoundedOnce);
    if (!with_norms) continue;
    const auto of_q_norm = [&](const std::vector<double>& at) {
      return Dot(heads_of(x, 0, kHeads, at), dq64.data());
    };
    const auto of_k_norm = [&](const std::vector<double>& at) {
      return Dot(heads_of(x, k_column, kKvHeads, at), dk64.data());
    };
    EXPECT_LT(RelativeError(ToDoubles(dq_norm), Slopes(of_q_norm, qn)), 2 * kRoundedOnce);
    EXPECT_LT(RelativeError(ToDoubles(dk_norm), Slopes(of_k_norm, kn)), 2 * kRoundedOnce);
  }
}

TEST(OracleGradientsTest, SwiGlu) {
  constexpr size_t kRows = 3;
  constexpr size_t kColumns = 50;
  Random random(4);
  const std::vector<Bf16> gate_up = NormalBf16(2 * kRows * kColumns, random, 2.0f);
  const std::vector<Bf16> ds = NormalBf16(kRows * kColumns, random);
  std::vector<Bf16> d(gate_up.size());
  ASSERT_TRUE(OracleBackend()
                  .Run(SwiGluGradientArgs{gate_up.data(), ds.data(), kRows, kColumns, d.data()})
                  .ok());
  const std::vector<double> ds64 = ToDoubles(ds);
  const auto loss = [&](const std::vector<double>& x) {
    double sum = 0;
    for (size_t i = 0; i < ds64.size(); ++i) {
      const size_t g = i / kColumns * 2 * kColumns + i % kColumns;
      sum += ds64[i] * x[g] / (1 + std::exp(-x[g])) * x[g + kColumns];
    }
    return sum;
  };
  EXPECT_LT(RelativeError(ToDoubles(d), Slopes(loss, ToDoubles(gate_up))), kRoundedOnce);
}

TEST(OracleGradientsTest, Embedding) {
  constexpr size_t kHidden = 5;
  constexpr size_t kVocab = 7;
  const std::vector<int32_t> tokens = {3, 1, 3, 3, 6, 1};  // of the rows
  const std::vector<int32_t> ids = {1, 3, 6};
  const std::vector<int32_t> starts = {0, 2, 5, 6};
  const std::vector<int32_t> rows = {1, 5, 0, 2, 3, 4};
  const std::vector<int64_t> packs = {0, 2, 6};
  Random random(5);
  const std::vector<Bf16> dy = NormalBf16(tokens.size() * kHidden, random);
  const std::vector<float> head = NormalFloats(2 * ids.size() * kHidden, random);
  for (const bool tied : {false, true}) {
    std::vector<float> dtable(kVocab * kHidden, 77.0f);
    ASSERT_TRUE(OracleBackend()
                    .Run(EmbeddingGradientArgs{dy.data(),
                                               kHidden,
                                               {ids.data(), starts.data(), rows.data(), 3},
                                               packs,
                                               tied ? head.data() : nullptr,
                                               dtable.data()})
                    .ok());
    std::vector<double> exact(dtable.size());
    for (size_t i = 0; i < dy.size(); ++i) {
      exact[static_cast<size_t>(tokens[i / kHidden]) * kHidden + i % kHidden] +=
          contract::Bf16ToFloat(dy[i]);
    }
    for (size_t i = 0; tied && i < head.size(); ++i) {
      const auto id = static_cast<size_t>(ids[i / kHidden % ids.size()]);
      exact[id * kHidden + i % kHidden] += static_cast<double>(head[i]);
    }
    for (size_t i = 0; i < exact.size(); ++i) {
      const bool written = std::ranges::count(ids, static_cast<int32_t>(i / kHidden)) != 0;
      EXPECT_NEAR(dtable[i], written ? exact[i] : 77.0, 1e-6) << i;
    }
  }
}

// Clipping and three steps of AdamW, as PyTorch computes them, in float64.
TEST(OracleGradientsTest, ClippingAndAdamW) {
  constexpr size_t kRows = 9;
  constexpr size_t kColumns = 11;
  constexpr size_t kCount = kRows * kColumns;
  constexpr double kLr = 0.01;
  constexpr double kDecay = 0.1;
  constexpr double kBeta1 = 0.9;
  constexpr double kBeta2 = 0.99;
  constexpr double kAdamEps = 1e-4;
  constexpr double kMaxNorm = 1.0;
  Random random(6);
  std::vector<float> parameter = NormalFloats(kCount, random);
  std::vector<double> p = ToDoubles(parameter);
  std::vector<float> m_out(kCount);
  std::vector<float> v_out(kCount);
  std::vector<Bf16> working(kCount);
  std::vector<double> m(kCount);
  std::vector<double> v(kCount);
  OracleBackend ops;
  for (int n = 1; n <= 3; ++n) {
    const std::vector<float> g = NormalFloats(kCount, random);
    std::vector<double> sums(kRows);
    double total = 0;
    ASSERT_TRUE(ops.Run(SquareSumsArgs{g.data(), kRows, kColumns, sums.data()}).ok());
    ASSERT_TRUE(ops.Run(TreeSum64Args{sums.data(), kRows, &total}).ok());
    double squares = 0;
    for (const float x : g) squares += std::pow(static_cast<double>(x), 2);
    EXPECT_NEAR(total, squares, 1e-13 * squares);
    const double clip = std::min(1.0, kMaxNorm / (std::sqrt(squares) + 1e-6));

    AdamWArgs args = {
        kCount, parameter.data(), m_out.data(), v_out.data(), g.data(), working.data(), {}};
    args.step.keep = static_cast<float>(1 - kLr * kDecay);
    args.step.beta1 = static_cast<float>(kBeta1);
    args.step.one_minus_beta1 = static_cast<float>(1 - kBeta1);
    args.step.beta2 = static_cast<float>(kBeta2);
    args.step.one_minus_beta2 = static_cast<float>(1 - kBeta2);
    args.step.rate = static_cast<float>(kLr / (1 - std::pow(kBeta1, n)));
    args.step.root_scale = static_cast<float>(1 / std::sqrt(1 - std::pow(kBeta2, n)));
    args.step.eps = static_cast<float>(kAdamEps);
    args.step.clip = static_cast<float>(clip);
    ASSERT_TRUE(ops.Run(args).ok());
    for (size_t i = 0; i < kCount; ++i) {
      const double x = clip * static_cast<double>(g[i]);
      m[i] += (1 - kBeta1) * (x - m[i]);
      v[i] = kBeta2 * v[i] + (1 - kBeta2) * x * x;
      const double m_hat = m[i] / (1 - std::pow(kBeta1, n));
      const double v_hat = v[i] / (1 - std::pow(kBeta2, n));
      p[i] -= kLr * kDecay * p[i];
      p[i] -= kLr * m_hat / (std::sqrt(v_hat) + kAdamEps);
      EXPECT_NEAR(parameter[i], p[i], 1e-6);
      EXPECT_EQ(working[i], contract::FloatToBf16(parameter[i]));
    }
    EXPECT_LT(RelativeError(ToDoubles(m_out), m), 1e-6);
    EXPECT_LT(RelativeError(ToDoubles(v_out), v), 1e-6);
  }
}

}  // namespace
}  // namespace isobit
