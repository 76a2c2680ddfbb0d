// Attention over whole sequences and its gradient: every configuration of the CPU backend has the
// oracle's bits.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/attention.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/training_cases.h"

namespace isobit::testing_support {
namespace {

struct Case {
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int64_t window;
  std::vector<int32_t> bounds;
  int64_t rows;
  std::vector<Bf16> q = {};
  std::vector<Bf16> k = {};
  std::vector<Bf16> v = {};
  std::vector<Bf16> dout = {};

  void Fill(Family family, Random& random) {
    q = RandomBf16(family, rows * heads * head_dim, random);
    k = RandomBf16(family, rows * kv_heads * head_dim, random);
    v = RandomBf16(family, rows * kv_heads * head_dim, random);
    dout = RandomBf16(family, rows * heads * head_dim, random);
  }
  TrainingAttentionArgs Forward(Bf16* out, float* log_sums) const {
    TrainingAttentionArgs args;
    args.q = q.data();
    args.k = k.data();
    args.v = v.data();
    args.rows = rows;
    args.heads = heads;
    args.kv_heads = kv_heads;
    args.head_dim = head_dim;
    args.sequences.bounds = bounds;
    args.scale = contract::AttentionScale(head_dim);
    args.window = window;
    args.out = out;
    args.log_sums = log_sums;
    return args;
  }
};

Bits Backward(OpTable& ops, const Case& c, Bf16* out, float* log_sums) {
  Guarded<Bf16> dq(static_cast<int64_t>(c.q.size()));
  Guarded<Bf16> dk(static_cast<int64_t>(c.k.size()));
  Guarded<Bf16> dv(static_cast<int64_t>(c.v.size()));
  EXPECT_TRUE(ops.Run(AttentionGradientArgs{c.Forward(out, log_sums), c.dout.data(), dq.data(),
                                            dk.data(), dv.data()})
                  .ok());
  Bits bits;
  bits.Add("dq", dq);
  bits.Add("dk", dk);
  bits.Add("dv", dv);
  return bits;
}

Bits RunCase(OpTable& ops, const Case& c) {
  Guarded<Bf16> out(static_cast<int64_t>(c.q.size()));
  Guarded<float> log_sums(c.heads * c.rows);
  EXPECT_TRUE(ops.Run(c.Forward(out.data(), log_sums.data())).ok());
  Bits bits = Backward(ops, c, out.data(), log_sums.data());
  bits.Add("out", out);
  bits.Add("log sums", log_sums);
  return bits;
}

TEST(TrainingAttentionTest, EqualsTheOracle) {
  Random random(1);
  std::vector<Case> cases = {
      {2, 1, 16, 0, {0, 1, 2, 3, 19, 19, 35}, 36},
      {3, 3, 20, 7, {0, 70, 80}, 85},
      {2, 1, 16, 0, {}, 5},
#ifndef ISOBIT_SANITIZED
      {4, 2, 64, 0, {0, 63, 128, 193}, 193},
      {6, 2, 80, 64, {0, 130}, 130},
      {2, 1, 128, 1, {0, 17, 90}, 95},
      {1, 1, 2, 0, {0, 300}, 300},
      {2, 1, 192, 0, {0, 100, 131}, 131},
      {2, 1, 32, 100, {0, 290}, 290},
      {1, 1, 16, 0, {0, 530}, 531},
#endif
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    // Not kWide: its scores are infinite, and then C13 defines no bits.
    cases[i].Fill(i % 3 == 2 ? Family::kZeros : Family::kNormal, random);
    ExpectOracleBits([&](OpTable& ops) { return RunCase(ops, cases[i]); });
  }
}

// Weights and gradients far below the products' fast range.
TEST(TrainingAttentionTest, SharpSoftmax) {
  Random random(2);
  Case c = {2, 1, 16, 0, {0, 70, 100}, 100};
  c.Fill(Family::kNormal, random);
  for (Bf16& x : c.q) x = contract::FloatToBf16(contract::Bf16ToFloat(x) * 20.0f);
  for (Bf16& x : c.dout) x = contract::FloatToBf16(contract::Bf16ToFloat(x) * 0x1p-60f);
  ExpectOracleBits([&](OpTable& ops) { return RunCase(ops, c); });
}

// A NaN of one sequence leaves the others alone.
TEST(TrainingAttentionTest, SequencesAreApart) {
  Random random(3);
  Case c = {2, 1, 16, 0, {0, 50, 100}, 100};
  c.Fill(Family::kNormal, random);
  const Bits clean = ExpectOracleBits([&](OpTable& ops) { return RunCase(ops, c); });
  c.dout[10 * 32] = 0x7f80;
  OracleBackend oracle;
  const Bits bad = RunCase(oracle, c);
  for (const char* name : {"dq", "dk", "dv"}) {
    const std::vector<uint64_t>& a = clean[name];
    const std::vector<uint64_t>& b = bad[name];
    EXPECT_TRUE(std::equal(a.begin() + static_cast<int64_t>(a.size()) / 2, a.end(),
                           b.begin() + static_cast<int64_t>(b.size()) / 2));
  }
}

#ifndef ISOBIT_SANITIZED  // sanitizers judge no bits
// The bits above depend on the order of the chains, so a wrong order would show.
TEST(TrainingAttentionTest, OrderMatters) {
  Random random(4);
  constexpr int64_t kRows = 256;
  constexpr int64_t kDim = 32;
  Case c = {2, 1, kDim, 0, {0, kRows}, kRows};
  c.Fill(Family::kNormal, random);
  // The second head's dk and dv cancel the first's but for what the chains truncate, so bf16 shows
  // the order. Likewise in the last row's dq, which weighs all keys alike: the second half of the
  // keys cancels the first.
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t e = 0; e < kDim; ++e) {
      const auto first = static_cast<size_t>(r * 2 * kDim + e);
      c.q[first + kDim] = c.q[first];
      c.dout[first + kDim] = c.dout[first] ^ 0x8000;
    }
  }
  std::fill(c.q.end() - 2 * kDim, c.q.end(), Bf16{0});
  for (size_t i = 0; i < kRows / 2 * kDim; ++i) {
    c.k[i + kRows / 2 * kDim] = c.k[i] ^ 0x8000;
    c.v[i + kRows / 2 * kDim] = c.v[i];
  }
  ExpectOracleBits([&](OpTable& ops) { return RunCase(ops, c); });
  OracleBackend oracle;
  std::vector<Bf16> out(c.q.size());
  std::vector<float> log_sums(2 * kRows);
  ASSERT_TRUE(oracle.Run(c.Forward(out.data(), log_sums.data())).ok());
  const Bits bits = Backward(oracle, c, out.data(), log_sums.data());

  // The last row sees all keys, so its dq is an ascending chain here.
  Case keys = c;
  keys.k = WithBlocksReversed(c.k, kDim);
  keys.v = WithBlocksReversed(c.v, kDim);
  const Bits ascending = Backward(oracle, keys, out.data(), log_sums.data());
  const auto last_row = [](const Bits& from) {
    return std::vector<uint64_t>(from["dq"].end() - 2 * kDim, from["dq"].end());
  };
  EXPECT_GT(Differences(last_row(ascending), last_row(bits)), 10);

  // dk and dv with the second query head first.
  Case heads = c;
  std::vector<Bf16> heads_out = out;
  for (int64_t r = 0; r < kRows; ++r) {
    for (std::vector<Bf16>* x : {&heads.q, &heads.dout, &heads_out}) {
      const auto row = x->begin() + r * 2 * kDim;
      std::rotate(row, row + kDim, row + 2 * kDim);
    }
  }
  std::vector<float> heads_log_sums = log_sums;
  std::rotate(heads_log_sums.begin(), heads_log_sums.begin() + kRows, heads_log_sums.end());
  const Bits swapped = Backward(oracle, heads, heads_out.data(), heads_log_sums.data());
  EXPECT_GT(Differences(swapped["dk"], bits["dk"]), 1000);
  EXPECT_GT(Differences(swapped["dv"], bits["dv"]), 1000);

  // At a sequence's first row e and D are the same sum in two orders, and dq shows their
  // difference: D's tree in another order would change it.
  const std::vector<uint64_t> first_row(bits["dq"].begin(), bits["dq"].begin() + 2 * kDim);
  EXPECT_GT(std::ranges::count_if(first_row, [](uint64_t x) { return (x & 0x7fff) != 0; }), 0);
}
#endif

}  // namespace
}  // namespace isobit::testing_support
