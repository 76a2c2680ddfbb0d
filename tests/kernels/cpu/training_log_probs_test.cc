// Logprobs of training rows, their gradients, losses and what those are made of: every
// configuration of the CPU backend has the oracle's bits.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/training_cases.h"

namespace isobit::testing_support {
namespace {

struct Case {
  int64_t rows;
  int64_t vocab;
  std::vector<float> logits;
  std::vector<int32_t> targets;
  std::vector<float> temperature;
  std::vector<int32_t> top_k;
  std::vector<float> top_p;
  std::vector<float> min_p;
  std::vector<float> dlogprobs;
  std::vector<float> dentropies;
  bool sampled = true;
  bool entropies = true;
};

Case RandomCase(int64_t rows, int64_t vocab, Family family, Random& random) {
  const auto one_of = [&random](const auto& values) { return values[random() % values.size()]; };
  Case c;
  c.rows = rows;
  c.vocab = vocab;
  c.logits = RandomFloats(family, rows * vocab, random);
  c.dlogprobs = RandomFloats(Family::kZeros, rows, random);
  c.dentropies = RandomFloats(Family::kZeros, rows, random);
  for (int64_t r = 0; r < rows; ++r) {
    c.targets.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(vocab)));
    c.temperature.push_back(one_of(std::vector<float>{0.0f, 0.7f, 1.0f, 1.0f, 3.0f}));
    c.top_k.push_back(one_of(std::vector<int32_t>{0, 0, 1, 5, 40, 1000000}));
    c.top_p.push_back(one_of(std::vector<float>{1.0f, 1.0f, 0.9f, 0.3f}));
    c.min_p.push_back(one_of(std::vector<float>{0.0f, 0.0f, 0.01f, 0.5f}));
  }
  return c;
}

Bits RunCase(OpTable& ops, const Case& c) {
  std::vector<LogProbRow> state(static_cast<size_t>(c.rows));
  Guarded<float> logprobs(c.rows);
  Guarded<float> entropies(c.rows);
  Guarded<Bf16> dlogits(c.rows * c.vocab);
  TrainingSampling sampling;
  if (c.sampled) {
    sampling = {c.temperature.data(), c.top_k.data(), c.top_p.data(), c.min_p.data()};
  }
  EXPECT_TRUE(ops.Run(TrainingLogProbsArgs{c.logits.data(), c.rows, c.vocab, c.targets.data(),
                                           sampling, logprobs.data(),
                                           c.entropies ? entropies.data() : nullptr, state.data()})
                  .ok());
  EXPECT_TRUE(
      ops.Run(LogProbGradientArgs{c.logits.data(), c.rows, c.vocab, c.targets.data(), sampling,
                                  state.data(), c.dlogprobs.data(),
                                  c.entropies ? c.dentropies.data() : nullptr, dlogits.data()})
          .ok());
  std::vector<float> sums;
  for (const LogProbRow& row : state) {
    EXPECT_EQ(row.last_id >= 0 && row.finite == 0, false);
    sums.insert(sums.end(), {row.sum.max, row.sum.sum, row.sum.weighted_distance,
                             static_cast<float>(row.finite)});
  }
  Bits bits;
  bits.Add("logprobs", logprobs);
  bits.Add("entropies", entropies);
  bits.Add("dlogits", dlogits);
  bits.Add("sums", sums);
  return bits;
}

TEST(TrainingLogProbsTest, EqualsTheOracle) {
  Random random(1);
  for (const Family family : kFamilies) {
    for (const int64_t vocab : {1, 5, 100, 3001}) {
      Case c = RandomCase(vocab > 1000 ? 8 : 40, vocab, family, random);
      c.sampled = random() % 4 != 0;
      c.entropies = random() % 4 != 0;
      SCOPED_TRACE(testing::Message() << static_cast<int>(family) << " " << vocab);
      ExpectOracleBits([&](OpTable& ops) { return RunCase(ops, c); });
    }
  }
}

// Rows that fail, and logits that overflow below: their tokens are in no set.
TEST(TrainingLogProbsTest, InfiniteLogits) {
  Random random(2);
  Case c = RandomCase(6, 50, Family::kNormal, random);
  c.logits[3] = std::numeric_limits<float>::infinity();
  c.logits[50 + 3] = -std::numeric_limits<float>::infinity();
  c.logits[100 + 3] = std::numeric_limits<float>::quiet_NaN();
  c.temperature = {1.0f, 1.0f, 1.0f, 0.5f, 0.5f, 0.5f};
  c.logits[150 + 3] = 3e38f;   // overflows
  c.logits[200 + 3] = -3e38f;  // becomes -inf
  c.temperature[5] = std::numeric_limits<float>::quiet_NaN();
  const Bits bits = ExpectOracleBits([&](OpTable& ops) { return RunCase(ops, c); });
  for (const size_t row : {0, 1, 2, 3, 5}) {
    EXPECT_EQ(bits["logprobs"][row], 0x7fffffffu);
    EXPECT_EQ(bits["dlogits"][row * 50], 0x7fffu);
  }
  EXPECT_EQ(bits["dlogits"][200 + 3], 0u);
  EXPECT_NE(bits["logprobs"][4], 0x7fffffffu);
}

TEST(TrainingLogProbsTest, Losses) {
  Random random(3);
  constexpr int64_t kTokens = 300;
  for (const Family family : kFamilies) {
    const std::vector<float> logprobs = RandomFloats(family, kTokens, random);
    const std::vector<float> advantages = RandomFloats(family, kTokens, random);
    const std::vector<float> weights = RandomFloats(Family::kZeros, kTokens, random);
    const std::vector<float> old = RandomFloats(family, kTokens, random);
    const std::vector<float> reference = RandomFloats(family, kTokens, random);
    for (int kind = 0; kind < 4; ++kind) {
      ExpectOracleBits([&](OpTable& ops) {
        Guarded<float> values(kTokens);
        Guarded<float> gradients(kTokens);
        PolicyLossArgs args = {kTokens,
                               logprobs.data(),
                               advantages.data(),
                               weights.data(),
                               kind % 2 == 0 ? nullptr : old.data(),
                               kind / 2 == 0 ? nullptr : reference.data(),
                               0.2f,
                               0.3f,
                               0.1f,
                               values.data(),
                               gradients.data()};
        EXPECT_TRUE(ops.Run(args).ok());
        Bits bits;
        bits.Add("values", values);
        bits.Add("gradients", gradients);
        return bits;
      });
    }
  }
}

// The tokens' NaN are those of the contract: its payload is nobody's promise, so only where it is.
TEST(TrainingLogProbsTest, LossesThatAreNaN) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> specials = {kNaN, kInf,  -kInf,   0.0f,  -0.0f,
                                       1.5f, -1.5f, -100.0f, 100.0f};
  std::vector<float> logprobs, old, advantages;
  for (const float l : specials) {
    for (const float o : specials) {
      for (const float a : specials) {
        logprobs.push_back(l), old.push_back(o), advantages.push_back(a);
      }
    }
  }
  const std::vector<float> weights(logprobs.size(), 1.0f);
  const auto tokens = static_cast<int64_t>(logprobs.size());
  const Bits bits = ExpectOracleBits([&](OpTable& ops) {
    std::vector<float> values(logprobs.size());
    std::vector<float> gradients(logprobs.size());
    PolicyLossArgs args = {.tokens = tokens,
                           .logprobs = logprobs.data(),
                           .advantages = advantages.data(),
                           .weights = weights.data(),
                           .old_logprobs = old.data(),
                           .values = values.data(),
                           .gradients = gradients.data()};
    EXPECT_TRUE(ops.Run(args).ok());
    args.clip_high = kNaN;
    EXPECT_EQ(ops.Run(args).code(), absl::StatusCode::kInvalidArgument);
    for (std::vector<float>* results : {&values, &gradients}) {
      for (float& x : *results) x = x != x ? contract::FromBits(0x7fffffffu) : x;
    }
    Bits result;
    result.Add("values", values);
    result.Add("gradients", gradients);
    return result;
  });
  for (size_t i = 0; i < logprobs.size(); ++i) {
    const bool has_nan =
        logprobs[i] != logprobs[i] || old[i] != old[i] || advantages[i] != advantages[i];
    if (!has_nan) continue;
    EXPECT_EQ(bits["values"][i], 0x7fffffffu) << logprobs[i] << old[i] << advantages[i];
    EXPECT_EQ(bits["gradients"][i], 0x7fffffffu) << logprobs[i] << old[i] << advantages[i];
  }
}

TEST(TrainingLogProbsTest, LossFunctions) {
  Random random(5);
  for (const Family family : kFamilies) {
    const std::vector<float> x = RandomFloats(family, 40000, random);  // more than a thread's part
    for (const auto function :
         {contract::LossFunction::kExp, contract::LossFunction::kLog,
          contract::LossFunction::kSigmoid, contract::LossFunction::kLogSigmoid}) {
      ExpectOracleBits([&](OpTable& ops) {
        const auto count = static_cast<int64_t>(x.size());
        Guarded<float> values(count);
        Guarded<float> gradients(count);
        EXPECT_TRUE(
            ops.Run(LossFunctionArgs{function, count, x.data(), values.data(), gradients.data()})
                .ok());
        Bits bits;
        bits.Add("values", values);
        bits.Add("gradients", gradients);
        return bits;
      });
    }
  }
}

TEST(TrainingLogProbsTest, SequenceSums) {
  Random random(6);
  std::vector<int32_t> bounds = {0};
  for (const int length : {0, 1, 2, 3, 7, 8, 9, 100, 4095, 4096, 4097, 0, 9000}) {
    bounds.push_back(bounds.back() + length);
  }
  const auto sequences = static_cast<int64_t>(bounds.size()) - 1;
  for (const Family family : kFamilies) {
    std::vector<float> x = RandomFloats(family, bounds.back(), random);
    if (family == Family::kZeros) std::ranges::fill(x, -0.0f);  // the padding is +0
    ExpectOracleBits([&](OpTable& ops) {
      Guarded<float> sums(sequences);
      EXPECT_TRUE(ops.Run(SequenceSumsArgs{x.data(), bounds.data(), sequences, sums.data()}).ok());
      Bits bits;
      bits.Add("sums", sums);
      return bits;
    });
  }
}

// The sums have no order (C7); but one token more or less in the set shows in every gradient.
TEST(TrainingLogProbsTest, TheSetMatters) {
  Random random(4);
  OracleBackend oracle;
  Case c = RandomCase(10, 200, Family::kNormal, random);
  std::ranges::fill(c.top_k, 50);
  std::ranges::fill(c.top_p, 1.0f);
  std::ranges::fill(c.min_p, 0.0f);
  std::ranges::fill(c.temperature, 1.0f);
  std::ranges::fill(c.dlogprobs, 1.0f);
  Case other = c;
  std::ranges::fill(other.top_k, 51);
  EXPECT_GT(Differences(RunCase(oracle, c)["dlogits"], RunCase(oracle, other)["dlogits"]), 100);
}

}  // namespace
}  // namespace isobit::testing_support
