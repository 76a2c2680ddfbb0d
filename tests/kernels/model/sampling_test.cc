// A sequence's rows: position, history, bans and stops.
#include "kernels/model/sampling.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace isobit {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(SequenceSamplingTest, PositionsAreAbsolute) {
  SequenceSampling sampling({}, {}, 9, 3, std::vector<int32_t>{5, 6, 7});
  EXPECT_EQ(sampling.NextRow().position, 3u);
  sampling.Append(1);
  const RowSampling row = sampling.NextRow();
  EXPECT_EQ(row.position, 4u);
  EXPECT_EQ(row.seed, 9u);
  EXPECT_EQ(row.sample, 3u);
  EXPECT_THAT(row.counts, IsEmpty()) << "no penalty needs them";
}

TEST(SequenceSamplingTest, CountsPromptAndOutputApart) {
  SamplingParams params;
  params.frequency_penalty = 1.0f;
  SequenceSampling sampling(params, {}, 0, 0, std::vector<int32_t>{5, 6, 5});
  sampling.Append(6);
  sampling.Append(8);
  sampling.Append(6);
  std::vector<std::vector<int32_t>> counts;
  for (const TokenCount& c : sampling.NextRow().counts)
    counts.push_back({c.id, c.in_prompt ? 1 : 0, c.in_output});
  EXPECT_THAT(counts,
              ElementsAre(ElementsAre(5, 1, 0), ElementsAre(6, 1, 2), ElementsAre(8, 0, 1)));
}

TEST(SequenceSamplingTest, StopTokensAreBannedBeforeMinTokens) {
  SamplingParams params;
  params.min_tokens = 2;
  params.stop_token_ids = {30, 10};
  SequenceSampling sampling(params, std::vector<int32_t>{20, 10}, 0, 0, std::vector<int32_t>{1});
  EXPECT_THAT(sampling.NextRow().banned, ElementsAre(10, 20, 30));
  sampling.Append(1);
  EXPECT_THAT(sampling.NextRow().banned, ElementsAre(10, 20, 30));
  sampling.Append(1);
  EXPECT_THAT(sampling.NextRow().banned, IsEmpty());
  EXPECT_TRUE(sampling.IsStop(20));
  EXPECT_FALSE(sampling.IsStop(21));
}

TEST(SequenceSamplingTest, ARowAheadIsTheRowAfterThoseTokens) {
  SamplingParams params;
  params.min_tokens = 2;
  params.logit_bias = {{4, 1.0f}};
  SequenceSampling sampling(params, std::vector<int32_t>{20}, 9, 3, std::vector<int32_t>{5, 6});
  EXPECT_FALSE(sampling.needs_counts());
  for (int i = 0; i < 4; ++i) {
    const RowSampling ahead = sampling.NextRow(1);
    sampling.Append(7);
    const RowSampling row = sampling.NextRow();
    EXPECT_EQ(ahead.position, row.position);
    EXPECT_EQ(ahead.banned, row.banned);
    EXPECT_EQ(ahead.biases.data(), row.biases.data());
  }
  params.presence_penalty = 0.5f;
  EXPECT_TRUE(SequenceSampling(params, {}, 0, 0, std::vector<int32_t>{1}).needs_counts());
}

TEST(SequenceSamplingTest, IgnoringEosLeavesOwnStopTokens) {
  SamplingParams params;
  params.ignore_eos = true;
  params.stop_token_ids = {30};
  const SequenceSampling sampling(params, std::vector<int32_t>{20}, 0, 0, std::vector<int32_t>{1});
  EXPECT_FALSE(sampling.IsStop(20));
  EXPECT_TRUE(sampling.IsStop(30));
}

TEST(SequenceSamplingTest, IgnoringEosDoesNotLetItBeDrawnBeforeMinTokens) {
  SamplingParams params;
  params.ignore_eos = true;
  params.min_tokens = 1;
  params.stop_token_ids = {30};
  SequenceSampling sampling(params, std::vector<int32_t>{40, 20}, 0, 0, std::vector<int32_t>{1});
  EXPECT_THAT(sampling.NextRow().banned, ElementsAre(20, 30, 40));
  sampling.Append(1);
  EXPECT_THAT(sampling.NextRow().banned, IsEmpty());
  EXPECT_FALSE(sampling.IsStop(20));
}

TEST(SequenceSamplingTest, TopKOfMinusOneMeansAll) {
  SamplingParams params;
  params.top_k = -1;
  EXPECT_EQ(SequenceSampling(params, {}, 0, 0, std::vector<int32_t>{1}).NextRow().top_k, 0);
}

}  // namespace
}  // namespace isobit
