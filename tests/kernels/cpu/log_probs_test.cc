// LogProbs on every instruction set and thread count against the oracle, which sorts the whole row:
// every filter, penalties, ties, masked tokens, tiny and uneven vocabularies.
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/log_prob_cases.h"

namespace isobit {
namespace {

using testing_support::AllCpuOptions;
using testing_support::Describe;
using testing_support::Logits;
using testing_support::LogProbCase;
using testing_support::MakeLogits;
using testing_support::Random;
using testing_support::RowBits;
using testing_support::RunLogProbs;

void ExpectOracleBits(const std::vector<LogProbCase>& requests) {
  const std::vector<RowBits> expected = RunLogProbs(*MakeOracleBackend(), requests);
  for (const CpuOptions& options : AllCpuOptions()) {
    const std::vector<RowBits> actual = RunLogProbs(*MakeCpuBackend(options), requests);
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(actual[i], expected[i])
          << Describe(options) << ", row " << i << ", " << Describe(requests[i]);
    }
  }
}

TEST(LogProbsTest, RandomRequests) {
  Random random(1);
  for (const int64_t vocab : {1, 2, 15, 63, 64, 65, 257, 1000, 5003}) {
    std::vector<LogProbCase> requests;
    for (int i = 0; i < 60; ++i) {
      requests.push_back(testing_support::RandomLogProbCase(vocab, random));
    }
    ExpectOracleBits(requests);
  }
}

TEST(LogProbsTest, EveryKindUnderEveryFilter) {
  Random random(2);
  for (const Logits kind : testing_support::kLogitKinds) {
    ExpectOracleBits(testing_support::EveryFilter(kind, 2000, random));
  }
}

TEST(LogProbsTest, NonFiniteRows) {
  Random random(3);
  size_t num_sound = 0;
  const std::vector<LogProbCase> requests = testing_support::NonFiniteCases(random, &num_sound);
  ExpectOracleBits(requests);
  const std::vector<RowBits> bits = RunLogProbs(*MakeCpuBackend({}), requests);
  for (size_t i = 0; i < bits.size(); ++i) EXPECT_EQ(bits[i][0], i + num_sound >= bits.size()) << i;
}

TEST(LogProbsTest, DrawDependsOnSeedSampleAndPositionAlone) {
  Random random(4);
  LogProbCase base;
  base.logits = MakeLogits(Logits::kFlat, 4000, random);
  base.sampling.seed = 1;
  std::vector<LogProbCase> requests(4, base);
  requests[1].sampling.seed = 2;
  requests[2].sampling.sample = 1;
  requests[3].sampling.position = 1;
  const std::vector<RowBits> crowd = RunLogProbs(*MakeCpuBackend({.num_threads = 3}), requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(RunLogProbs(*MakeCpuBackend({}), {requests[i]})[0], crowd[i]);
    for (size_t j = 0; j < i; ++j) EXPECT_NE(crowd[i][2], crowd[j][2]);
  }
}

}  // namespace
}  // namespace isobit
