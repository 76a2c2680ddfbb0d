// The scorer's promise: a score's bits depend only on the sequence, its parameters and the weights.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "tests/trainer_bridge/scorer/scoring_fixture.h"

namespace isobit {
namespace {

// Bits of each sequence's score, by index.
class ScorerBitsTest : public testing::TestWithParam<Architecture> {
 protected:
  ScorerBitsTest() : config_(testing_support::TinyConfig(GetParam())) {
    testing_support::WriteTinyModel(config_, 11, dir_.File("model"));
  }

  std::unique_ptr<Scorer> Load(int shards, int64_t max_batch_tokens,
                               NumericsMode mode = NumericsMode::kTree) {
    return Load(shards, max_batch_tokens, [mode] { return MakeOracleBackend(mode); });
  }

  std::unique_ptr<Scorer> Load(int shards, int64_t max_batch_tokens,
                               std::function<std::unique_ptr<Backend>()> make_ops) {
    ScorerOptions options;
    options.model_root = dir_.path();
    options.num_shards = shards;
    options.max_batch_tokens = max_batch_tokens;
    options.backend.make_ops = [make_ops = std::move(make_ops)](int) { return make_ops(); };
    absl::StatusOr<std::unique_ptr<Scorer>> scorer = Scorer::Load(options, "model");
    EXPECT_THAT(scorer, testing_support::IsOk());
    return std::move(*scorer);
  }

  const testing_support::TempDir dir_;
  const ModelConfig config_;
};

#ifdef ISOBIT_SANITIZED
// The scorer's code is the same for all.
const auto kArchitectures = testing::Values(Architecture::kMistral);
#else
const auto kArchitectures = testing::Values(Architecture::kLlama, Architecture::kMistral,
                                            Architecture::kQwen2, Architecture::kQwen3);
#endif
INSTANTIATE_TEST_SUITE_P(Architectures, ScorerBitsTest, kArchitectures,
                         [](const auto& info) { return ArchitectureName(info.param); });

TEST_P(ScorerBitsTest, ScoresAreThoseOfTheDefinition) {
  const auto scorer = Load(2, 128);
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 1, 5, 60);
  ScoreOptions raw = FullOptions();
  raw.raw = true;
  ScoreOptions greedy;
  greedy.sampling.temperature = 0;
  for (const ScoreOptions& options : {FullOptions(), raw, greedy, ScoreOptions()}) {
    const AllBits bits = ScoreAll(*scorer, inputs, options);
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_EQ(bits[i], Bits(ScoreByDefinition(dir_.File("model"), inputs[i], options)))
          << "sequence " << i;
    }
  }
}

TEST_P(ScorerBitsTest, BitsDoNotDependOnShardsOrPacking) {
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 2, 12, 40);
  const AllBits expected = ScoreAll(*Load(1, 4096), inputs, FullOptions());
  for (const int shards : {1, 2, 3, 4, 8}) {
    for (const int64_t max_batch_tokens : {1, 50, 4096}) {
      const auto scorer = Load(shards, max_batch_tokens);
      EXPECT_EQ(ScoreAll(*scorer, inputs, FullOptions()), expected)
          << shards << " shards, " << max_batch_tokens << " tokens";
      EXPECT_EQ(scorer->peak_blocks(), shards > 1 ? 2 : 0);
    }
  }
}

TEST_P(ScorerBitsTest, BitsDoNotDependOnOrderOrCompany) {
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 3, 10, 40);
  const auto scorer = Load(3, 64);
  const AllBits expected = ScoreAll(*scorer, inputs, FullOptions());
  std::vector<ScoreInput> reversed(inputs.rbegin(), inputs.rend());
  AllBits bits = ScoreAll(*scorer, reversed, FullOptions());
  std::reverse(bits.begin(), bits.end());
  EXPECT_EQ(bits, expected);

  const Submitted crowd = MakeJob(RandomInputs(config_, 4, 30, 50));
  ISOBIT_ASSERT_OK(scorer->Submit(crowd.job));
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(ScoreAll(*scorer, {inputs[i]}, FullOptions())[0], expected[i]) << "sequence " << i;
  }
  ISOBIT_EXPECT_OK(crowd.collector->WaitUntilDone());
}

TEST_P(ScorerBitsTest, BitsDoNotDependOnInstructionSetOrThreads) {
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 5, 12, 40);
  const AllBits expected = ScoreAll(*Load(1, 4096), inputs, FullOptions());
  for (const cpu::Isa isa : {cpu::Isa::kPortable, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    if (isa > cpu::DetectIsa()) continue;
    for (const int threads : {1, 2}) {
      const auto make_ops = [=] { return MakeCpuBackend({.isa = isa, .num_threads = threads}); };
      EXPECT_EQ(ScoreAll(*Load(2, 100, make_ops), inputs, FullOptions()), expected)
          << cpu::IsaName(isa) << ", " << threads << " threads";
    }
  }
}

// Control test of the comparisons above: an ordinary engine's arithmetic fails them.
TEST_P(ScorerBitsTest, Control) {
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 2, 12, 40);
  const AllBits crowded = ScoreAll(*Load(1, 4096, NumericsMode::kVanilla), inputs, FullOptions());
  const AllBits alone = ScoreAll(*Load(1, 1, NumericsMode::kVanilla), inputs, FullOptions());
  EXPECT_NE(crowded, alone);
  EXPECT_EQ(ScoreAll(*Load(1, 4096, NumericsMode::kBatchInvariant), inputs, FullOptions()),
            ScoreAll(*Load(4, 1, NumericsMode::kBatchInvariant), inputs, FullOptions()));
}

TEST_P(ScorerBitsTest, AChunkBoundaryDoesNotShow) {
  std::vector<ScoreInput> inputs = RandomInputs(config_, 6, 1, 40);
  inputs[0].completion.resize(200, 17);
  ScoreOptions options = FullOptions();
  const AllBits bits = ScoreAll(*Load(1, 4096), inputs, options);
  EXPECT_EQ(bits[0], Bits(ScoreByDefinition(dir_.File("model"), inputs[0], options)));
}

TEST_P(ScorerBitsTest, APromptAloneMayBeScored) {
  const auto scorer = Load(2, 64);
  ScoreOptions options;
  options.prompt_logprobs = true;
  const Submitted submitted = MakeJob(
      {{.prompt = {4, 5, 6}, .completion = {}}, {.prompt = {4}, .completion = {}}}, options);
  ISOBIT_ASSERT_OK(scorer->Submit(submitted.job));
  ISOBIT_ASSERT_OK(submitted.collector->WaitUntilDone());
  const auto scores = submitted.collector->scores();
  EXPECT_EQ(scores.at(0).prompt.logprobs.size(), 2u);
  EXPECT_EQ(scores.at(1).prompt.logprobs.size(), 0u);
  EXPECT_EQ(scores.at(0).completion.logprobs.size(), 0u);
}

TEST_P(ScorerBitsTest, ATokenThatCouldNotBeDrawnHasLogprobMinusInfinity) {
  const auto scorer = Load(1, 64);
  ScoreOptions options;
  options.sampling.min_tokens = 2;
  options.sampling.stop_token_ids = {9};
  const Submitted submitted = MakeJob({{.prompt = {4}, .completion = {9, 9, 9}}}, options);
  ISOBIT_ASSERT_OK(scorer->Submit(submitted.job));
  ISOBIT_ASSERT_OK(submitted.collector->WaitUntilDone());
  const std::vector<float> logprobs = submitted.collector->scores().at(0).completion.logprobs;
  EXPECT_EQ(logprobs[0], -INFINITY);
  EXPECT_EQ(logprobs[1], -INFINITY);
  EXPECT_TRUE(std::isfinite(logprobs[2]));
}

}  // namespace
}  // namespace isobit
