// LogProbs on every instruction set and thread count against the oracle, which sorts the whole row:
// every filter, penalties, ties, masked tokens, tiny and uneven vocabularies.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/oracle/oracle_ops.h"
#include "tests/kernels/cpu/op_cases.h"

namespace isobit {
namespace {

using testing_support::AllCpuOptions;
using testing_support::Describe;
using testing_support::Random;

constexpr int32_t kTop = 7;

enum class Logits { kPeaked, kFlat, kTied, kEqual, kSteep, kSignedZeros };
constexpr Logits kKinds[] = {Logits::kPeaked, Logits::kFlat,  Logits::kTied,
                             Logits::kEqual,  Logits::kSteep, Logits::kSignedZeros};

std::vector<float> MakeLogits(Logits kind, int64_t vocab, Random& random) {
  std::normal_distribution<float> normal;
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (float& z : logits) {
    switch (kind) {
      case Logits::kPeaked:
        z = 4.0f * normal(random);
        break;
      case Logits::kFlat:
        z = 0.01f * normal(random);
        break;
      case Logits::kTied:
        z = std::round(2.0f * normal(random));
        break;
      case Logits::kEqual:
        z = -1.25f;
        break;
      case Logits::kSteep:
        z = 60.0f * normal(random);
        break;
      case Logits::kSignedZeros:
        z = random() % 2 == 0 ? 0.0f : -0.0f;
        break;
    }
  }
  return logits;
}

// One row's request, owning what RowSampling points to.
struct Request {
  RowSampling sampling;
  std::vector<TokenCount> counts;
  std::vector<TokenBias> biases;
  std::vector<int32_t> banned;
  std::vector<float> logits;
  bool score = false;
  bool raw = false;
};

template <typename T, size_t kSize>
T Pick(const T (&choices)[kSize], Random& random) {
  return choices[random() % kSize];
}

Request MakeRequest(int64_t vocab, Random& random) {
  Request r;
  r.logits = MakeLogits(Pick(kKinds, random), vocab, random);
  RowSampling& s = r.sampling;
  const auto size = static_cast<int32_t>(vocab);
  s.temperature = Pick({1.0f, 0.0f, 0.7f, 1.3f, 0.05f}, random);
  s.top_k = Pick({0, 0, 1, 2, 20, 200, size - 1, size, size + 5}, random);
  s.top_p = Pick({1.0f, 1.0f, 0.9f, 0.5f, 0.999f, 0.01f, 0x1.fffffep-1f}, random);
  s.min_p = Pick({0.0f, 0.0f, 0.05f, 0.5f, 1.0f, 1e-6f}, random);
  s.seed = random();
  s.sample = static_cast<uint32_t>(random() % 3);
  s.position = static_cast<uint32_t>(random() % 1000);
  if (random() % 2 == 0) {
    s.repetition_penalty = Pick({1.0f, 1.2f, 0.8f}, random);
    s.presence_penalty = Pick({0.0f, 0.5f, -0.5f}, random);
    s.frequency_penalty = Pick({0.0f, 0.3f, -0.1f}, random);
  }
  // Distinct ids, but for biases that may fall on counted tokens.
  for (int32_t id = 0; id < size && id < 40; id += 3) {
    r.counts.push_back({id, static_cast<int32_t>(random() % 4), random() % 2 == 0});
    if (random() % 4 == 0) r.biases.push_back({id, Pick({5.0f, -5.0f, 100.0f, -100.0f}, random)});
    if (random() % 8 == 0 && id + 1 < size && size > 2) r.banned.push_back(id + 1);
  }
  r.score = random() % 3 == 0;
  r.raw = random() % 4 == 0;
  return r;
}

LogProbRow RowOf(const Request& r, TokenLogProb* top) {
  LogProbRow row{.logits = r.logits.data(),
                 .sampling = r.sampling,
                 .target = r.score ? static_cast<int32_t>(r.logits.size() / 2) : -1,
                 .raw = r.raw,
                 .top_logprobs = top != nullptr ? kTop : 0,
                 .want_entropy = true,
                 .token = {-7, -7.0f},
                 .top = top,
                 .entropy = -7.0f,
                 .finite = true};
  row.sampling.counts = r.counts;
  row.sampling.biases = r.biases;
  row.sampling.banned = r.banned;
  return row;
}

// All outputs of a row, as bit patterns.
std::vector<uint32_t> BitsOf(const LogProbRow& row) {
  std::vector<uint32_t> bits = {
      static_cast<uint32_t>(row.finite), static_cast<uint32_t>(row.token.id),
      std::bit_cast<uint32_t>(row.token.logprob), std::bit_cast<uint32_t>(row.entropy)};
  for (int32_t i = 0; i < row.top_logprobs; ++i) {
    bits.push_back(static_cast<uint32_t>(row.top[i].id));
    bits.push_back(std::bit_cast<uint32_t>(row.top[i].logprob));
  }
  return bits;
}

std::vector<std::vector<uint32_t>> RunRows(Ops& ops, const std::vector<Request>& requests) {
  std::vector<std::vector<TokenLogProb>> tops(requests.size(), std::vector<TokenLogProb>(kTop));
  std::vector<LogProbRow> rows;
  for (size_t i = 0; i < requests.size(); ++i) rows.push_back(RowOf(requests[i], tops[i].data()));
  EXPECT_TRUE(ops.LogProbs({.rows = rows.data(),
                            .num_rows = static_cast<int64_t>(rows.size()),
                            .vocab = static_cast<int64_t>(requests.front().logits.size())})
                  .ok());
  std::vector<std::vector<uint32_t>> bits;
  for (const LogProbRow& row : rows) bits.push_back(BitsOf(row));
  return bits;
}

void ExpectOracleBits(const std::vector<Request>& requests) {
  const std::unique_ptr<Ops> oracle = MakeOracleOps();
  const auto expected = RunRows(*oracle, requests);
  for (const CpuOptions& options : AllCpuOptions()) {
    const std::unique_ptr<Ops> ops = MakeCpuOps(options);
    const auto actual = RunRows(*ops, requests);
    for (size_t i = 0; i < requests.size(); ++i) {
      const RowSampling& s = requests[i].sampling;
      EXPECT_EQ(actual[i], expected[i])
          << Describe(options) << ", row " << i << ", vocab " << requests[i].logits.size()
          << ", temperature " << s.temperature << ", top_k " << s.top_k << ", top_p " << s.top_p
          << ", min_p " << s.min_p;
    }
  }
}

TEST(LogProbsTest, RandomRequests) {
  Random random(1);
  for (const int64_t vocab : {1, 2, 15, 63, 64, 65, 257, 1000, 5003}) {
    std::vector<Request> requests;
    for (int i = 0; i < 60; ++i) requests.push_back(MakeRequest(vocab, random));
    ExpectOracleBits(requests);
  }
}

TEST(LogProbsTest, EveryKindUnderEveryFilter) {
  Random random(2);
  std::vector<Request> requests;
  for (const Logits kind : kKinds) {
    for (const int32_t top_k : {0, 1, 5, 300}) {
      for (const float top_p : {1.0f, 0.8f, 0.1f}) {
        for (const float min_p : {0.0f, 0.02f}) {
          Request r;
          r.logits = MakeLogits(kind, 2000, random);
          r.sampling.top_k = top_k;
          r.sampling.top_p = top_p;
          r.sampling.min_p = min_p;
          r.sampling.seed = random();
          requests.push_back(r);
        }
      }
    }
  }
  ExpectOracleBits(requests);
}

TEST(LogProbsTest, NonFiniteRows) {
  Random random(3);
  std::vector<Request> requests;
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (const size_t at : {size_t{0}, size_t{99}}) {
      Request r;
      r.logits = MakeLogits(Logits::kPeaked, 100, random);
      r.logits[at] = bad;
      requests.push_back(r);
    }
  }
  Request overflowing;  // finite logits that temperature makes infinite
  overflowing.logits = std::vector<float>(100, 1e30f);
  overflowing.sampling.temperature = 1e-10f;
  requests.push_back(overflowing);
  Request all_banned;
  all_banned.logits = std::vector<float>(100, 1.0f);
  for (int32_t id = 0; id < 100; ++id) all_banned.banned.push_back(id);
  requests.push_back(all_banned);
  Request sound;
  sound.logits = MakeLogits(Logits::kPeaked, 100, random);
  requests.push_back(sound);
  ExpectOracleBits(requests);
  const auto bits = RunRows(*MakeCpuOps({}), requests);
  for (size_t i = 0; i < bits.size(); ++i) EXPECT_EQ(bits[i][0], i + 1 == bits.size()) << i;
}

TEST(LogProbsTest, DrawDependsOnSeedSampleAndPositionAlone) {
  Random random(4);
  Request base;
  base.logits = MakeLogits(Logits::kFlat, 4000, random);
  base.sampling.seed = 1;
  std::vector<Request> requests(4, base);
  requests[1].sampling.seed = 2;
  requests[2].sampling.sample = 1;
  requests[3].sampling.position = 1;
  const auto crowd = RunRows(*MakeCpuOps({.num_threads = 3}), requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(RunRows(*MakeCpuOps({}), {requests[i]})[0], crowd[i]);
    for (size_t j = 0; j < i; ++j) EXPECT_NE(crowd[i][1], crowd[j][1]);
  }
}

}  // namespace
}  // namespace isobit
