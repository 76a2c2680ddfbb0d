// The scores of a model with slots: sequences that begin alike go on from a common state, and have
// the bits that each has alone, which are those that the rollout has drawn.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/model/pack_model.h"
#include "tests/rollout/engine/engine_slots_fixture.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/running_sum.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "tests/trainer_bridge/scorer/scoring_fixture.h"
#include "trainer_bridge/scorer/shard_ranks.h"

namespace isobit {
namespace {

// Counts the rows of forward passes.
class CountingOps final : public testing_support::ForwardingBackend {
 public:
  explicit CountingOps(std::atomic<int64_t>& rows)
      : ForwardingBackend(MakeCpuBackend({})), rows_(rows) {
    Replace<EmbeddingArgs>(*this);
  }
  absl::Status On(const EmbeddingArgs& args) {
    rows_ += args.rows;
    return inner().Run(args);
  }

 private:
  std::atomic<int64_t>& rows_;
};

// Shard ranks of a plan with the weights of a directory. Each call of Score is one pass.
class PlanScorer {
 public:
  PlanScorer(const ModelPlan& plan, const std::string& directory, int shards, bool sharing) {
    ShardRanksOptions options;
    options.num_shards = shards;
    options.num_ranks = shards;
    options.max_context = plan.config.max_position_embeddings;
    options.max_batch_tokens = 256;
    options.chunk_rows = 7;
    options.prefix_sharing = sharing;
    options.backend.make_ops = [this](int) { return std::make_unique<CountingOps>(rows_); };
    auto ranks = ShardRanks::Create(plan, std::move(options));
    ISOBIT_EXPECT_OK(ranks);
    ranks_ = *std::move(ranks);
    const auto checkpoint = *Checkpoint::Open(directory);
    weights_ =
        *ranks_->Cut(1, [&](WeightStore& store) { return PackModel(checkpoint, "", store); });
  }

  // The bits of each sequence. Sequence i is scored by rank i % shards.
  AllBits Score(const std::vector<ScoreInput>& inputs, const ScoreOptions& options) {
    AllBits bits;
    for (const auto& [index, score] : Scores(inputs, options)) bits.push_back(Bits(score));
    EXPECT_EQ(bits.size(), inputs.size());
    return bits;
  }

  std::map<size_t, SequenceScore> Scores(const std::vector<ScoreInput>& inputs,
                                         const ScoreOptions& options) {
    const Submitted submitted = MakeJob(inputs, options);
    const auto shards = static_cast<size_t>(ranks_->options().num_shards);
    std::vector<std::vector<ScoreItem>> items(shards);
    for (size_t i = 0; i < inputs.size(); ++i) items[i % shards].push_back({submitted.job, i});
    const absl::Status scored = ranks_->Score(*weights_, items);
    ISOBIT_EXPECT_OK(scored);
    if (!scored.ok()) return {};
    ISOBIT_EXPECT_OK(submitted.collector->WaitUntilDone());
    return submitted.collector->scores();
  }

  // That all ranks have computed since the last call.
  int64_t TakeRows() { return rows_.exchange(0); }

 private:
  std::atomic<int64_t> rows_{0};
  std::unique_ptr<ShardRanks> ranks_;
  std::shared_ptr<const ShardedVersion> weights_;
};

int64_t TokensOf(const std::vector<ScoreInput>& inputs) {
  int64_t tokens = 0;
  for (const ScoreInput& input : inputs) tokens += input.num_tokens();
  return tokens;
}

// The parameter: StateSpec::slot_rows.
class ScorerSlotsTest : public testing::TestWithParam<int32_t> {
 protected:
  ScorerSlotsTest() : config_(testing_support::TinyConfig(Architecture::kQwen3)) {
    testing_support::WriteTinyModel(config_, 11, dir_.File("model"));
  }

  PlanScorer MakeScorer(int shards, bool sharing) const {
    return {testing_support::PlanWithRunningSums(config_, GetParam()), dir_.File("model"), shards,
            sharing};
  }

  // Each sequence's bits in a pass of its own.
  AllBits EachAlone(const std::vector<ScoreInput>& inputs, const ScoreOptions& options) const {
    PlanScorer scorer = MakeScorer(1, false);
    AllBits bits;
    for (const ScoreInput& input : inputs) bits.push_back(scorer.Score({input}, options)[0]);
    return bits;
  }

  const testing_support::TempDir dir_;
  const ModelConfig config_;
};
INSTANTIATE_TEST_SUITE_P(Rows, ScorerSlotsTest, testing::Values(1, 4),
                         testing::PrintToStringParamName());

TEST_P(ScorerSlotsTest, BitsAreThoseOfEachSequenceAlone) {
  const std::vector<ScoreInput> inputs = AlikeInputs(config_, 5);
  for (const ScoreOptions& options : {FullOptions(), ScoreOptions()}) {
    const AllBits expected = EachAlone(inputs, options);
    for (const int shards : {1, 2, 4}) {
      PlanScorer alone = MakeScorer(shards, false), sharing = MakeScorer(shards, true);
      EXPECT_EQ(alone.Score(inputs, options), expected) << shards << " shards";
      EXPECT_EQ(alone.TakeRows(), TokensOf(inputs));
      for (int pass = 0; pass < 2; ++pass) {  // the second finds what the first has left in slots
        EXPECT_EQ(sharing.Score(inputs, options), expected) << shards << " shards, sharing";
        EXPECT_LT(sharing.TakeRows(), TokensOf(inputs) * 3 / 4);
      }
    }
  }
}

// Sequences in any order: a state may be wanted at several pages of one sequence.
TEST_P(ScorerSlotsTest, AnyOrderOfAlikeSequences) {
  std::vector<ScoreInput> inputs = AlikeInputs(config_, 6);
  AllBits expected = EachAlone(inputs, FullOptions());
  PlanScorer scorer = MakeScorer(1, true);
  for (int order = 0; order < 6; ++order) {
    EXPECT_EQ(scorer.Score(inputs, FullOptions()), expected) << order;
    std::rotate(inputs.begin(), inputs.begin() + 5, inputs.end());
    std::rotate(expected.begin(), expected.begin() + 5, expected.end());
    if (order == 2) {
      std::ranges::reverse(inputs);
      std::ranges::reverse(expected);
    }
  }
}

// A prompt of three pages and more, and completions of it: the prompt's pages are computed once.
TEST_P(ScorerSlotsTest, APromptsStateIsComputedOnce) {
  const std::vector<ScoreInput> two = RandomInputs(config_, 3, 2, 60);
  for (const size_t prompt_tokens : {48u, 53u}) {
    ScoreInput input = AlikeInputs(config_, 8)[0];
    input.prompt.resize(prompt_tokens);
    std::vector<ScoreInput> inputs;
    for (int32_t i = 0; i < 6; ++i) {
      input.completion.assign(10 + static_cast<size_t>(i), 20 + i);
      inputs.push_back(input);
    }
    PlanScorer scorer = MakeScorer(1, true);
    EXPECT_EQ(scorer.Score(inputs, FullOptions()), EachAlone(inputs, FullOptions()));
    EXPECT_EQ(scorer.TakeRows(), TokensOf(inputs) - 5 * 48);
    // What others leave in the slots of a scorer is not found.
    EXPECT_EQ(scorer.Score(two, FullOptions()), EachAlone(two, FullOptions()));
    EXPECT_EQ(scorer.Score(inputs, FullOptions()), EachAlone(inputs, FullOptions()));
  }
}

// Control: without the sums the scores are others.
TEST_P(ScorerSlotsTest, Control) {
  const std::vector<ScoreInput> inputs = AlikeInputs(config_, 5);
  const AllBits expected = EachAlone(inputs, ScoreOptions());
  PlanScorer without(ModelPlan(config_), dir_.File("model"), 1, true);
  const AllBits other = without.Score(inputs, ScoreOptions());
  ASSERT_EQ(other.size(), expected.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(other[i] != expected[i], inputs[i].completion.size() > 0) << i;
  }
}

using RolloutAndScorerTest = EngineSlotsFixture;
INSTANTIATE_TEST_SUITE_P(Slots, RolloutAndScorerTest, AllRowsAndDepths(), RowsAndDepthName);

// INVARIANT: the logprobs of the rollout, which draws token by token from states that it keeps, are
// those of the scorer, which computes all rows at once.
TEST_P(RolloutAndScorerTest, HaveTheSameBits) {
  std::vector<GenerationRequest> requests = Strangers(6, 20);
  for (uint32_t i = 0; i < 3; ++i) {
    requests.push_back(Request(std::to_string(i), Tokens(77, 20 + 2 * i), 20, 3));
  }
  const auto engine = MakeEngine(Roomy());
  const Sinks sinks = RunAll(*engine, requests);
  PlanScorer sharing(Plan(), root_.File("v1"), 2, true);
  PlanScorer alone(Plan(), root_.File("v1"), 1, false);
  for (size_t r = 0; r < requests.size(); ++r) {
    SCOPED_TRACE(requests[r].id);
    ScoreOptions options;
    options.sampling = requests[r].sampling;
    std::vector<ScoreInput> inputs;
    for (const auto& [index, sample] : sinks[r]->samples) {
      ASSERT_EQ(sample.tokens.size(), 20u);
      inputs.push_back({requests[r].prompt, sample.tokens});
    }
    for (PlanScorer* const scorer : {&sharing, &alone}) {
      const std::map<size_t, SequenceScore> scores = scorer->Scores(inputs, options);
      ASSERT_EQ(scores.size(), inputs.size());
      for (const auto& [index, score] : scores) {
        ExpectSameTokens({.tokens = inputs[index].completion,
                          .logprobs = score.completion.logprobs,
                          .versions = {},
                          .top = {},
                          .end = {}},
                         sinks[r]->samples.at(static_cast<uint32_t>(index)));
      }
    }
  }
}

}  // namespace
}  // namespace isobit
