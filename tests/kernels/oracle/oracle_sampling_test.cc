// What the filters, penalties and draws of C8 mean, on rows small enough to check by hand. The CPU
// backend equals the oracle on random rows (tests/kernels/cpu/log_probs_test.cc), so these tests
// hold for both.
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/oracle/oracle_backend.h"

namespace isobit {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class OracleSamplingTest : public testing::Test {
 protected:
  // The logprob of every id under the sampling parameters; -inf: filtered out.
  std::vector<float> LogProbs(const RowSampling& sampling, bool raw = false) {
    std::vector<float> logprobs;
    for (size_t id = 0; id < logits_.size(); ++id) {
      logprobs.push_back(
          Compute({.sampling = sampling, .target = static_cast<int32_t>(id), .raw = raw})
              .token.logprob);
    }
    return logprobs;
  }

  std::set<int32_t> Kept(const RowSampling& sampling) {
    std::set<int32_t> kept;
    const std::vector<float> logprobs = LogProbs(sampling);
    for (size_t id = 0; id < logprobs.size(); ++id) {
      if (logprobs[id] > -kInfinity) kept.insert(static_cast<int32_t>(id));
    }
    return kept;
  }

  int32_t Draw(const RowSampling& sampling) { return Compute({.sampling = sampling}).token.id; }

  LogProbResult Compute(const LogProbRequest& request) {
    LogProbResult result;
    EXPECT_TRUE(ops_->Run(LogProbsArgs{.logits = logits_.data(),
                                       .requests = &request,
                                       .results = &result,
                                       .num_rows = 1,
                                       .vocab = static_cast<int64_t>(logits_.size())})
                    .ok());
    EXPECT_TRUE(result.finite);
    return result;
  }

  // Probabilities 0.4, 0.2, 0.2, 0.1, 0.1: ids 1 and 2 tie, and so do 3 and 4.
  std::vector<float> logits_ = {std::log(4.0f), std::log(2.0f), std::log(2.0f), 0.0f, 0.0f};
  std::unique_ptr<Backend> ops_ = MakeOracleBackend();
  RowSampling sampling_;
};

using Ids = std::set<int32_t>;

TEST_F(OracleSamplingTest, PlainIsSoftmax) {
  const std::vector<float> logprobs = LogProbs(sampling_);
  EXPECT_NEAR(logprobs[0], std::log(0.4), 1e-6);
  EXPECT_NEAR(logprobs[1], std::log(0.2), 1e-6);
  EXPECT_NEAR(logprobs[4], std::log(0.1), 1e-6);
}

TEST_F(OracleSamplingTest, TemperatureDivides) {
  sampling_.temperature = 0.5f;
  EXPECT_NEAR(LogProbs(sampling_)[0], std::log(16.0 / 26.0), 1e-6);
  sampling_.temperature = 0.0f;  // greedy: the distribution of temperature 1
  EXPECT_NEAR(LogProbs(sampling_)[0], std::log(0.4), 1e-6);
}

TEST_F(OracleSamplingTest, TopKTiesGoToTheLowestId) {
  sampling_.top_k = 2;
  EXPECT_EQ(Kept(sampling_), (Ids{0, 1}));
  EXPECT_NEAR(LogProbs(sampling_)[0], std::log(4.0 / 6.0), 1e-6);  // renormalised
  sampling_.top_k = 5;
  EXPECT_EQ(Kept(sampling_).size(), 5u);
  sampling_.top_k = 500;
  EXPECT_EQ(Kept(sampling_).size(), 5u);
}

TEST_F(OracleSamplingTest, TopPKeepsTheShortestPrefixThatReachesIt) {
  sampling_.top_p = 0.39f;
  EXPECT_EQ(Kept(sampling_), (Ids{0}));
  sampling_.top_p = 0.41f;
  EXPECT_EQ(Kept(sampling_), (Ids{0, 1}));
  sampling_.top_p = 0.75f;
  EXPECT_EQ(Kept(sampling_), (Ids{0, 1, 2}));
  sampling_.top_p = 1e-6f;  // never nothing
  EXPECT_EQ(Kept(sampling_), (Ids{0}));
}

TEST_F(OracleSamplingTest, TopPCountsWhatTopKKept) {
  sampling_.top_k = 3;
  sampling_.top_p = 0.45f;  // of 0.5, 0.25, 0.25
  EXPECT_EQ(Kept(sampling_), (Ids{0}));
  sampling_.top_p = 0.7f;
  EXPECT_EQ(Kept(sampling_), (Ids{0, 1}));
}

TEST_F(OracleSamplingTest, MinPIsRelativeToTheLargest) {
  sampling_.min_p = 0.45f;
  EXPECT_EQ(Kept(sampling_), (Ids{0, 1, 2}));
  sampling_.min_p = 0.55f;
  EXPECT_EQ(Kept(sampling_), (Ids{0}));
  sampling_.min_p = 0.2f;
  EXPECT_EQ(Kept(sampling_).size(), 5u);
}

TEST_F(OracleSamplingTest, GreedyIgnoresFilters) {
  sampling_.temperature = 0.0f;
  sampling_.top_k = 1;
  sampling_.min_p = 0.9f;
  EXPECT_EQ(Kept(sampling_).size(), 5u);
  EXPECT_EQ(Draw(sampling_), 0);
}

TEST_F(OracleSamplingTest, MinPComesBeforeTopP) {
  sampling_.min_p = 0.45f;  // keeps 0.5, 0.25, 0.25
  sampling_.top_p = 0.45f;
  EXPECT_EQ(Kept(sampling_), (Ids{0}));  // of the whole row, 0.4 were not enough
  sampling_.top_p = 0.7f;
  EXPECT_EQ(Kept(sampling_), (Ids{0, 1}));
}

TEST_F(OracleSamplingTest, MinPComesBeforeTopK) {
  sampling_.min_p = 0.45f;
  sampling_.top_k = 4;
  sampling_.top_p = 0.74f;  // of 0.5, 0.25, 0.25; of four tokens it would take the third as well
  EXPECT_EQ(Kept(sampling_), (Ids{0, 1}));
}

TEST_F(OracleSamplingTest, BiasComesBeforeTheRepetitionPenalty) {
  const std::vector<TokenCount> counts = {{.id = 3, .in_output = 0, .in_prompt = true}};
  const std::vector<TokenBias> biases = {{.id = 3, .bias = 2.0f}};
  sampling_.temperature = 0.0f;
  sampling_.counts = counts;
  sampling_.biases = biases;
  sampling_.repetition_penalty = 2.0f;  // (0 + 2) / 2 < log 4; 0 / 2 + 2 would be more
  EXPECT_EQ(Draw(sampling_), 0);
  sampling_.repetition_penalty = 1.0f;
  EXPECT_EQ(Draw(sampling_), 3);
}

TEST_F(OracleSamplingTest, GreedyTakesTheLargestPenalisedLogit) {
  const std::vector<TokenCount> counts = {{.id = 0, .in_output = 2, .in_prompt = false}};
  const std::vector<TokenBias> biases = {{.id = 3, .bias = 10.0f}};
  const std::vector<int32_t> banned = {3};
  sampling_.temperature = 0.0f;
  sampling_.counts = counts;
  sampling_.frequency_penalty = 0.5f;  // log 4 - 1 < log 2
  EXPECT_EQ(Draw(sampling_), 1);
  sampling_.biases = biases;
  EXPECT_EQ(Draw(sampling_), 3);
  sampling_.banned = banned;
  EXPECT_EQ(Draw(sampling_), 1);
  EXPECT_EQ(Kept(sampling_), (Ids{0, 1, 2, 4}));
}

TEST_F(OracleSamplingTest, RawIsOfTheLogitsAlone) {
  sampling_.temperature = 0.25f;
  sampling_.top_k = 1;
  const std::vector<float> raw = LogProbs(sampling_, true);
  EXPECT_NEAR(raw[0], std::log(0.4), 1e-6);
  EXPECT_NEAR(raw[4], std::log(0.1), 1e-6);
}

TEST_F(OracleSamplingTest, TopLogprobsListIsSortedAndPadded) {
  sampling_.top_k = 3;
  const std::vector<TokenLogProb> top = Compute({.sampling = sampling_, .top_logprobs = 6}).top;
  ASSERT_EQ(top.size(), 6u);
  EXPECT_EQ(top[0].id, 0);
  EXPECT_EQ(top[1].id, 1);
  EXPECT_EQ(top[2].id, 2);
  EXPECT_NEAR(top[2].logprob, std::log(0.25), 1e-6);
  for (size_t i = 3; i < top.size(); ++i) EXPECT_EQ(top[i].id, -1);
}

TEST_F(OracleSamplingTest, DrawsFollowTheDistribution) {
  constexpr int kDraws = 20000;
  std::vector<int> seen(logits_.size());
  for (int i = 0; i < kDraws; ++i) {
    sampling_.position = static_cast<uint32_t>(i);
    ++seen[static_cast<size_t>(Draw(sampling_))];
  }
  const double expected[] = {0.4, 0.2, 0.2, 0.1, 0.1};
  for (size_t id = 0; id < seen.size(); ++id) {
    // Five standard deviations of a binomial share.
    EXPECT_NEAR(seen[id] / static_cast<double>(kDraws), expected[id], 0.0177) << id;
  }
}

TEST_F(OracleSamplingTest, DrawsOnlyWhatIsKept) {
  sampling_.top_k = 2;
  for (uint32_t i = 0; i < 500; ++i) {
    sampling_.position = i;
    EXPECT_LT(Draw(sampling_), 2);
  }
}

}  // namespace
}  // namespace isobit
