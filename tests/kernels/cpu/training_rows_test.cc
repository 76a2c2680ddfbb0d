// The gradients of row functions, sums and the optimizer: every configuration of the CPU backend
// has the oracle's bits.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/rope.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/training_cases.h"

namespace isobit::testing_support {
namespace {

#ifdef ISOBIT_SANITIZED
constexpr int kTrials = 5;
#else
constexpr int kTrials = 20;
#endif

int64_t Below(int64_t n, Random& random) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
}

// Zeros of either sign in whole rows, as masked tokens have them.
void ZeroRows(int64_t columns, Random& random, std::vector<Bf16>* x) {
  for (size_t i = 0; i < x->size(); ++i) {
    if (i / static_cast<size_t>(columns) % 3 == 1) (*x)[i] = random() % 2 == 0 ? 0 : 0x8000;
  }
}

struct NormCase {
  int64_t columns;
  std::vector<int64_t> packs;
  std::vector<Bf16> x;
  std::vector<Bf16> weight;
  std::vector<Bf16> dy;
};

Bits NormGradient(OpTable& ops, const NormCase& c) {
  Guarded<Bf16> dx(static_cast<int64_t>(c.x.size()));
  Guarded<float> dw(c.columns);
  EXPECT_TRUE(ops.Run(RmsNormGradientArgs{c.x.data(), c.weight.data(), c.dy.data(), c.columns,
                                          1e-6f, c.packs, dx.data(), dw.data()})
                  .ok());
  Guarded<float> sums(c.columns);
  EXPECT_TRUE(
      ops.Run(ColumnSumsArgs{c.dy.data(), c.columns, c.columns, c.packs, sums.data()}).ok());
  Bits bits;
  bits.Add("dx", dx);
  bits.Add("dw", dw);
  bits.Add("column sums", sums);
  return bits;
}

NormCase RandomNorm(int64_t rows, int64_t columns, int64_t packs, Family family, Random& random) {
  NormCase c;
  c.columns = columns;
  c.packs = RandomPacks(rows, packs, random);
  c.x = RandomBf16(family, rows * columns, random);
  c.weight = RandomBf16(family, columns, random);
  c.dy = RandomBf16(family, rows * columns, random);
  ZeroRows(columns, random, &c.dy);
  return c;
}

TEST(TrainingRowsTest, RmsNormGradientAndColumnSums) {
  Random random(1);
  for (int trial = 0; trial < kTrials; ++trial) {
    SCOPED_TRACE(trial);
    const int64_t columns = trial < 8 ? 4 << trial : 1 + Below(700, random);
    NormCase c = RandomNorm(1 + Below(200, random), columns, int64_t{1} << (trial % 7),
                            kFamilies[trial % 4], random);
    if (trial % 5 == 4) c.dy[random() % c.dy.size()] = 0x7f80;
    ExpectOracleBits([&](OpTable& ops) { return NormGradient(ops, c); });
  }
}

// A dot product of -0 alone is -0 where C5's tree has no padding, and +0 where it has: dx shows it.
TEST(TrainingRowsTest, PaddingDecidesTheSignOfZero) {
  for (const int64_t columns : {4, 8, 12, 16, 64, 96, 100, 128, 256, 384, 512, 520}) {
    SCOPED_TRACE(columns);
    NormCase c;
    c.columns = columns;
    c.packs = {0, 1};
    c.x = c.weight = std::vector<Bf16>(static_cast<size_t>(columns), 0x3f80);
    c.dy = std::vector<Bf16>(static_cast<size_t>(columns), 0x8000);
    const Bits bits = ExpectOracleBits([&](OpTable& ops) { return NormGradient(ops, c); });
    const bool padded = !std::has_single_bit(static_cast<uint64_t>(columns));
    EXPECT_EQ(bits["dx"][0], padded ? 0x8000u : 0u);
  }
}

TEST(TrainingRowsTest, SwiGluGradient) {
  Random random(2);
  for (const Family family : kFamilies) {
    const int64_t rows = 1 + Below(20, random);
    const int64_t columns = 1 + Below(300, random);
    const std::vector<Bf16> gate_up = RandomBf16(family, 2 * rows * columns, random);
    const std::vector<Bf16> ds = RandomBf16(family, rows * columns, random);
    ExpectOracleBits([&](OpTable& ops) {
      Guarded<Bf16> d(2 * rows * columns);
      EXPECT_TRUE(
          ops.Run(SwiGluGradientArgs{gate_up.data(), ds.data(), rows, columns, d.data()}).ok());
      Bits bits;
      bits.Add("dgate_up", d);
      return bits;
    });
  }
}

struct QkvCase {
  TrainingQkvArgs args;  // without results
  std::vector<int64_t> packs;
  std::vector<Bf16> qkv;
  std::vector<Bf16> q_norm;
  std::vector<Bf16> k_norm;
  std::vector<Bf16> dq;
  std::vector<Bf16> dk;
  std::vector<Bf16> dv;
  std::vector<int32_t> positions;
  contract::RopeTable rope;

  QkvCase(int32_t heads, int32_t kv_heads, int32_t head_dim, bool norms, int64_t rows,
          Random& random) {
    const Family family = norms ? Family::kNormal : Family::kZeros;
    packs = RandomPacks(rows, 4, random);
    qkv = RandomBf16(family, rows * (heads + 2 * kv_heads) * head_dim, random);
    q_norm = RandomBf16(family, head_dim, random);
    k_norm = RandomBf16(family, head_dim, random);
    dq = RandomBf16(family, rows * heads * head_dim, random);
    dk = RandomBf16(family, rows * kv_heads * head_dim, random);
    dv = RandomBf16(family, rows * kv_heads * head_dim, random);
    ZeroRows(heads * head_dim, random, &dq);
    for (int64_t r = 0; r < rows; ++r) {
      positions.push_back(static_cast<int32_t>(Below(100, random)));
    }
    rope = contract::MakeRopeTable(100, head_dim, 10000, {});
    args.qkv = qkv.data();
    args.rows = rows;
    args.positions = positions.data();
    args.heads = heads;
    args.kv_heads = kv_heads;
    args.head_dim = head_dim;
    args.q_norm = norms ? q_norm.data() : nullptr;
    args.k_norm = norms ? k_norm.data() : nullptr;
    args.eps = 1e-6f;
    args.cosine = rope.cosine.data();
    args.sine = rope.sine.data();
  }

  Bits Run(OpTable& ops) const {
    Guarded<Bf16> q(static_cast<int64_t>(dq.size()));
    Guarded<Bf16> k(static_cast<int64_t>(dk.size()));
    Guarded<Bf16> v(static_cast<int64_t>(dv.size()));
    Guarded<Bf16> dqkv(static_cast<int64_t>(qkv.size()));
    Guarded<float> dq_norm(args.head_dim);
    Guarded<float> dk_norm(args.head_dim);
    TrainingQkvArgs forward = args;
    forward.q = q.data();
    forward.k = k.data();
    forward.v = v.data();
    EXPECT_TRUE(ops.Run(forward).ok());
    EXPECT_TRUE(ops.Run(QkvGradientArgs{args, dq.data(), dk.data(), dv.data(), packs, dqkv.data(),
                                        dq_norm.data(), dk_norm.data()})
                    .ok());
    Bits bits;
    bits.Add("q", q);
    bits.Add("k", k);
    bits.Add("v", v);
    bits.Add("dqkv", dqkv);
    bits.Add("dq_norm", dq_norm);
    bits.Add("dk_norm", dk_norm);
    return bits;
  }
};

TEST(TrainingRowsTest, Qkv) {
  Random random(3);
  for (int trial = 0; trial < kTrials; ++trial) {
    SCOPED_TRACE(trial);
    const int32_t head_dim =
        std::vector<int32_t>{16, 2, 64, 80, 128, 6}[static_cast<size_t>(trial) % 6];
    const auto kv_heads = static_cast<int32_t>(1 + trial % 3);
    QkvCase c(kv_heads * (1 + trial % 2), kv_heads, head_dim, trial % 4 != 3,
              1 + Below(150, random), random);
    if (trial % 5 == 4) c.qkv[random() % c.qkv.size()] = 0x7f80;
    ExpectOracleBits([&](OpTable& ops) { return c.Run(ops); });
  }
}

// A v that is not finite poisons its key, here as in serving.
TEST(TrainingRowsTest, QkvPoisonsKeys) {
  Random random(4);
  QkvCase c(2, 2, 8, true, 3, random);
  c.qkv[(1 * 6 + 4) * 8 + 3] = 0x7f80;  // row 1, v head 0
  const Bits bits = ExpectOracleBits([&](OpTable& ops) { return c.Run(ops); });
  for (size_t i = 16; i < 24; ++i) {
    EXPECT_EQ(bits["k"][i], 0x7fffu);
    EXPECT_EQ(bits["v"][i], 0u);
  }
  EXPECT_NE(bits["k"][24], 0x7fffu);
}

TEST(TrainingRowsTest, EmbeddingGradient) {
  Random random(5);
  for (int trial = 0; trial < kTrials; ++trial) {
    SCOPED_TRACE(trial);
    const int64_t hidden = 1 + Below(100, random);
    const int64_t rows = 1 + Below(200, random);
    const int64_t vocab = 1 + Below(60, random);
    const std::vector<int64_t> packs = RandomPacks(rows, int64_t{1} << (trial % 7), random);
    std::vector<std::vector<int32_t>> rows_of(static_cast<size_t>(vocab));
    for (int64_t r = 0; r < rows; ++r) {
      rows_of[random() % rows_of.size()].push_back(static_cast<int32_t>(r));
    }
    std::vector<int32_t> ids;
    std::vector<int32_t> starts = {0};
    std::vector<int32_t> sorted;
    for (int32_t id = static_cast<int32_t>(vocab) - 1; id >= 0; --id) {
      const std::vector<int32_t>& of_id = rows_of[static_cast<size_t>(id)];
      if (of_id.empty()) continue;
      ids.push_back(id);
      sorted.insert(sorted.end(), of_id.begin(), of_id.end());
      starts.push_back(static_cast<int32_t>(sorted.size()));
    }
    const auto num_ids = static_cast<int64_t>(ids.size());
    const std::vector<Bf16> dy = RandomBf16(kFamilies[trial % 4], rows * hidden, random);
    const std::vector<float> head = RandomFloats(
        Family::kNormal, (static_cast<int64_t>(packs.size()) - 1) * num_ids * hidden, random);
    ExpectOracleBits([&](OpTable& ops) {
      Guarded<float> dtable(vocab * hidden);  // rows of other ids stay as they are
      EXPECT_TRUE(ops.Run(EmbeddingGradientArgs{dy.data(),
                                                hidden,
                                                {ids.data(), starts.data(), sorted.data(), num_ids},
                                                packs,
                                                trial % 2 == 0 ? nullptr : head.data(),
                                                dtable.data()})
                      .ok());
      Bits bits;
      bits.Add("dtable", dtable);
      return bits;
    });
  }
}

// Parts of a parameter that begin and end anywhere, of moments that bf16 holds and does not hold.
TEST(TrainingRowsTest, Dither) {
  Random random(7);
  for (int trial = 0; trial < kTrials; ++trial) {
    SCOPED_TRACE(trial);
    const int64_t count = trial == 0 ? 0 : 1 + Below(trial % 3 == 0 ? 70000 : 40, random);
    std::vector<float> x = RandomFloats(kFamilies[trial % 4], count, random);
    for (int64_t i = 0; i < count; i += 13) {
      x[static_cast<size_t>(i)] = i % 2 == 0 ? 3.4e38f : std::numeric_limits<float>::infinity();
    }
    const auto step = static_cast<uint64_t>(1 + Below(100000, random));
    const auto moment = static_cast<uint32_t>(Below(2, random));
    const auto first = static_cast<uint64_t>(Below(int64_t{1} << 40, random));
    ExpectOracleBits([&](OpTable& ops) {
      Guarded<Bf16> out(count);
      EXPECT_TRUE(ops.Run(DitherArgs{x.data(), count, step, moment, first, out.data()}).ok());
      for (int64_t i = 0; i < count; ++i) {
        const float from = x[static_cast<size_t>(i)];
        EXPECT_EQ(std::isfinite(contract::Bf16ToFloat(out.data()[i])), std::isfinite(from));
      }
      Bits bits;
      bits.Add("out", out);
      return bits;
    });
  }
}

// What is kept is on average what was given, and one of its two neighbours.
TEST(TrainingRowsTest, DitherHasNoDrift) {
  constexpr int64_t kCount = 100000;
  Random random(8);
  const std::vector<float> x = RandomFloats(Family::kNormal, kCount, random);
  std::vector<Bf16> out(x.size());
  ASSERT_TRUE(OracleBackend().Run(DitherArgs{x.data(), kCount, 3, 1, 0, out.data()}).ok());
  double drift = 0;  // of magnitudes, in distances of bf16 neighbours
  for (size_t i = 0; i < x.size(); ++i) {
    const float to = std::abs(contract::Bf16ToFloat(out[i]));
    const int64_t units = int64_t{contract::BitsOf(to)} - contract::BitsOf(std::abs(x[i]));
    EXPECT_LT(std::abs(units), 65536);
    drift += static_cast<double>(units) / 65536;
  }
  EXPECT_NEAR(drift / kCount, 0.0, 0.01);
}

TEST(TrainingRowsTest, SumsAndAdamW) {
  Random random(6);
  for (int trial = 0; trial < kTrials; ++trial) {
    SCOPED_TRACE(trial);
    const int64_t rows = 1 + Below(70, random);
    const int64_t columns = trial < 4 ? 1 + trial : 1 + Below(600, random);
    const int64_t count = rows * columns;
    const Family family = kFamilies[trial % 4];
    const std::vector<float> gradient = RandomFloats(family, count, random);
    const std::vector<float> parameter = RandomFloats(family, count, random);
    const std::vector<float> m = RandomFloats(Family::kNormal, count, random);
    std::vector<float> v = RandomFloats(Family::kZeros, count, random);
    for (float& value : v) value *= value;
    const contract::AdamWStep step = {0.999f, 0.9f, 0.1f, 0.99f, 0.01f, 1e-3f, 1.5f, 1e-8f, 0.3f};
    ExpectOracleBits([&](OpTable& ops) {
      Guarded<float> p_out(count);
      Guarded<float> m_out(count);
      Guarded<float> v_out(count);
      Guarded<Bf16> working(count);
      std::ranges::copy(parameter, p_out.data());
      std::ranges::copy(m, m_out.data());
      std::ranges::copy(v, v_out.data());
      EXPECT_TRUE(
          ops.Run(AdamWArgs{count, p_out.data(), m_out.data(), v_out.data(), gradient.data(),
                            trial % 3 == 0 ? nullptr : working.data(), step})
              .ok());
      std::vector<double> sums(static_cast<size_t>(rows));
      double total = 0;
      float sum = 0;
      EXPECT_TRUE(ops.Run(SquareSumsArgs{gradient.data(), rows, columns, sums.data()}).ok());
      EXPECT_TRUE(ops.Run(TreeSum64Args{sums.data(), rows, &total}).ok());
      EXPECT_TRUE(ops.Run(TreeSumArgs{gradient.data(), count, &sum}).ok());
      Bits bits;
      bits.Add("parameter", p_out);
      bits.Add("m", m_out);
      bits.Add("v", v_out);
      bits.Add("working", working);
      bits.Add("square sums", sums);
      bits.Add("total", {&total, 1});
      bits.Add("sum", {&sum, 1});
      return bits;
    });
  }
}

// The bits above depend on the order of every sum, so a wrong order would show.
TEST(TrainingRowsTest, OrderMatters) {
  Random random(7);
  OracleBackend oracle;
  NormCase c = RandomNorm(256, 48, 1, Family::kNormal, random);
  for (Bf16& x : c.dy) {  // 12 binades: fp32 rounds their sums
    x = contract::FloatToBf16(
        std::ldexp(contract::Bf16ToFloat(x), static_cast<int>(random() % 12)));
  }
  c.packs = {0, 64, 128, 192, 256};
  const Bits bits = NormGradient(oracle, c);
  NormCase packs_rotated = c;
  std::rotate(packs_rotated.x.begin(), packs_rotated.x.begin() + 64 * 48, packs_rotated.x.end());
  std::rotate(packs_rotated.dy.begin(), packs_rotated.dy.begin() + 64 * 48, packs_rotated.dy.end());
  const Bits rotated = NormGradient(oracle, packs_rotated);
  EXPECT_GT(Differences(rotated["dw"], bits["dw"]), 3);
  EXPECT_GT(Differences(rotated["column sums"], bits["column sums"]), 3);
  NormCase one_pack = c;  // the chain of four blocks instead of the tree of four packs
  one_pack.packs = {0, 256};
  EXPECT_GT(Differences(NormGradient(oracle, one_pack)["dw"], bits["dw"]), 3);
  NormCase other_blocks = c;  // 1 and 63 rows instead of 64
  other_blocks.packs = {0, 1, 64, 128, 128, 192, 192, 256, 256};
  EXPECT_GT(Differences(NormGradient(oracle, other_blocks)["dw"], bits["dw"]), 3);

  // The dot product of a row: its two halves cancel but for rounding, and half of dy is +0, so dx
  // shows the mean's own bits.
  NormCase dots = RandomNorm(64, 256, 1, Family::kNormal, random);
  std::ranges::fill(dots.weight, Bf16{0x3f80});
  for (int64_t r = 0; r < 64; ++r) {
    for (int64_t i = 0; i < 64; ++i) {
      const int64_t row = r * 256;
      const int64_t mirror = row + 127 - i;
      const int64_t from = row + i;
      dots.x[static_cast<size_t>(mirror)] = dots.x[static_cast<size_t>(from)];
      dots.dy[static_cast<size_t>(from)] = RandomBf16(Family::kNormal, 1, random)[0];
      dots.dy[static_cast<size_t>(mirror)] = dots.dy[static_cast<size_t>(from)] ^ 0x8000;
    }
    for (int64_t i = 128; i < 256; ++i) dots.dy[static_cast<size_t>(r * 256 + i)] = 0;
  }
  NormCase rolled = dots;  // columns 0 .. 127 turned by one
  for (int64_t r = 0; r < 64; ++r) {
    const auto x = rolled.x.begin() + r * 256;
    const auto dy = rolled.dy.begin() + r * 256;
    std::rotate(x, x + 1, x + 128);
    std::rotate(dy, dy + 1, dy + 128);
  }
  EXPECT_GT(Differences(NormGradient(oracle, rolled)["dx"], NormGradient(oracle, dots)["dx"]),
            1000);
  ExpectOracleBits([&](OpTable& ops) { return NormGradient(ops, dots); });

  // The heads of dq_norm.
  const QkvCase heads(4, 1, 16, true, 100, random);
  QkvCase turned = heads;
  for (int64_t r = 0; r < 100; ++r) {
    const auto q = turned.qkv.begin() + r * 6 * 16;
    const auto dq = turned.dq.begin() + r * 4 * 16;
    std::rotate(q, q + 16, q + 64);
    std::rotate(dq, dq + 16, dq + 64);
  }
  turned.args = heads.args;
  turned.args.qkv = turned.qkv.data();
  EXPECT_GT(Differences(turned.Run(oracle)["dq_norm"], heads.Run(oracle)["dq_norm"]), 0);
}

}  // namespace
}  // namespace isobit::testing_support
