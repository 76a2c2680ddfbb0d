// Sequences that begin alike are computed once, and their scores keep the bits that each has alone.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "tests/trainer_bridge/scorer/pass_gate.h"
#include "tests/trainer_bridge/scorer/scoring_fixture.h"

namespace isobit {
namespace {

using testing_support::StatusIs;

// Calls a hook with the rows of each forward pass, at its start.
class ObservedOps final : public testing_support::ForwardingBackend {
 public:
  ObservedOps(std::unique_ptr<Backend> ops, std::function<void(int64_t rows)> on_pass)
      : ForwardingBackend(std::move(ops)), on_pass_(std::move(on_pass)) {
    Replace<EmbeddingArgs>(*this);
  }
  absl::Status On(const EmbeddingArgs& args) {
    on_pass_(args.rows);
    return inner().Run(args);
  }

 private:
  const std::function<void(int64_t rows)> on_pass_;
};

struct ScorerSetup {
  int shards = 1;
  int64_t max_batch_tokens = 4096;
  bool sharing = true;
  size_t chunk_rows = 64;
  NumericsMode mode = NumericsMode::kTree;
};

// A model whose attention differs from the others'.
struct Model {
  std::string name;
  Architecture architecture;
  int64_t head_dim;  // 0: the tiny model's
  int64_t num_kv_heads;
};

class ScorerPrefixTest : public testing::TestWithParam<Model> {
 protected:
  ScorerPrefixTest() : config_(testing_support::TinyConfig(GetParam().architecture)) {
    if (GetParam().head_dim > 0) {
      config_.head_dim = GetParam().head_dim;
      config_.num_kv_heads = GetParam().num_kv_heads;
    }
    testing_support::WriteTinyModel(config_, 11, dir_.File("model"));
  }

  std::unique_ptr<Scorer> Load(const ScorerSetup& setup) {
    ScorerOptions options;
    options.model_root = dir_.path();
    options.num_shards = setup.shards;
    options.max_batch_tokens = setup.max_batch_tokens;
    options.chunk_rows = setup.chunk_rows;
    options.prefix_sharing = setup.sharing;
    options.backend.make_ops = [this, mode = setup.mode](int) {
      return std::make_unique<ObservedOps>(MakeCpuBackend({.mode = mode}), [this](int64_t rows) {
        rows_ += rows;
        ISOBIT_EXPECT_OK(gate_.Pass());
        if (on_pass_) on_pass_(rows);
      });
    };
    absl::StatusOr<std::unique_ptr<Scorer>> scorer = Scorer::Load(options, "model");
    EXPECT_THAT(scorer, testing_support::IsOk());
    return std::move(*scorer);
  }

  // Tokens of a random sequence.
  std::vector<int32_t> Random(size_t count) {
    std::vector<int32_t> tokens(count);
    for (int32_t& id : tokens) {
      id = static_cast<int32_t>(random_() % static_cast<uint64_t>(config_.vocab_size));
    }
    return tokens;
  }

  static int64_t TokensOf(const std::vector<ScoreInput>& inputs) {
    int64_t tokens = 0;
    for (const ScoreInput& input : inputs) tokens += input.num_tokens();
    return tokens;
  }

  // What passes have done once they have accounted for `tokens`: a little after the last score.
  static ScorerWork WorkOf(const Scorer& scorer, int64_t tokens) {
    for (int i = 0; i < 60'000 && scorer.work().tokens < tokens; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return scorer.work();
  }

  // Each sequence's bits in a pass of its own.
  AllBits EachAlone(const std::vector<ScoreInput>& inputs, const ScoreOptions& options,
                    NumericsMode mode = NumericsMode::kTree) {
    const auto scorer = Load({.sharing = false, .mode = mode});
    AllBits bits;
    for (const ScoreInput& input : inputs) bits.push_back(ScoreAll(*scorer, {input}, options)[0]);
    return bits;
  }

  static std::vector<ScoreOptions> AllOptions() {
    ScoreOptions raw = FullOptions();
    raw.raw = true;
    ScoreOptions completions = FullOptions();
    completions.prompt_logprobs = false;
    ScoreOptions greedy;
    greedy.sampling.temperature = 0;
    return {FullOptions(), raw, completions, greedy, ScoreOptions()};
  }

  const testing_support::TempDir dir_;
  ModelConfig config_;
  std::mt19937_64 random_{5};
  std::atomic<int64_t> rows_{0};  // that passes of all scorers computed
  PassGate gate_;
  std::function<void(int64_t rows)> on_pass_;  // after the gate
};

INSTANTIATE_TEST_SUITE_P(Models, ScorerPrefixTest,
                         testing::Values(Model{"Llama", Architecture::kLlama, 0, 0},
                                         Model{"Mistral", Architecture::kMistral, 0,
                                               0},  // sliding window
                                         Model{"Qwen2", Architecture::kQwen2, 0, 0},
                                         Model{"Qwen3", Architecture::kQwen3, 0, 0},
                                         Model{"Qwen3Head64", Architecture::kQwen3, 64, 1},
                                         Model{"LlamaHead32", Architecture::kLlama, 32, 1}),
                         [](const auto& info) { return info.param.name; });

// INVARIANT: what sequences of a pass share changes no bit of any.
// Every setup with several options, every option with several setups: all pairs take too long under
// the sanitizers.
TEST_P(ScorerPrefixTest, BitsAreThoseOfEachSequenceAlone) {
  const std::vector<ScoreInput> inputs = AlikeInputs(config_, 5);
  const std::vector<ScoreOptions> all_options = AllOptions();
  const std::vector<ScorerSetup> setups = {{.chunk_rows = 7},
                                           {.sharing = false},
                                           {.max_batch_tokens = 1},
                                           {.shards = 2, .max_batch_tokens = 150},
                                           {.shards = 4, .chunk_rows = 1},
                                           {.shards = 4, .sharing = false}};
  for (size_t o = 0; o < all_options.size(); ++o) {
    const AllBits expected = EachAlone(inputs, all_options[o]);
    for (size_t s = o % 3; s < setups.size(); s += 3) {
      const ScorerSetup& setup = setups[s];
      const auto scorer = Load(setup);
      EXPECT_EQ(ScoreAll(*scorer, inputs, all_options[o]), expected)
          << setup.shards << " shards, " << setup.max_batch_tokens << " tokens";
      EXPECT_EQ(WorkOf(*scorer, TokensOf(inputs)).shared_tokens > 0,
                setup.sharing && setup.max_batch_tokens > 1);
    }
  }
}

TEST_P(ScorerPrefixTest, RandomMixes) {
  for (int trial = 0; trial < 6; ++trial) {
    std::vector<ScoreInput> inputs;
    for (int i = 0; i < 12; ++i) {
      std::vector<int32_t> tokens;
      if (i > 0 && random_() % 4 > 0) {
        const ScoreInput& earlier = inputs[random_() % inputs.size()];
        tokens = earlier.prompt;
        tokens.insert(tokens.end(), earlier.completion.begin(), earlier.completion.end());
        tokens.resize(random_() % (tokens.size() + 1));
      }
      for (const int32_t id : Random((tokens.empty() ? 1 : 0) + random_() % 50)) {
        tokens.push_back(id);
      }
      const auto prompt = static_cast<int64_t>(1 + random_() % tokens.size());
      inputs.push_back(
          {{tokens.begin(), tokens.begin() + prompt}, {tokens.begin() + prompt, tokens.end()}});
    }
    const ScoreOptions options = AllOptions()[static_cast<size_t>(trial) % 5];
    const AllBits expected = EachAlone(inputs, options);
    const ScorerSetup setup = {.shards = 1 + trial % 4,
                               .max_batch_tokens = 40 + static_cast<int64_t>(random_() % 300)};
    EXPECT_EQ(ScoreAll(*Load(setup), inputs, options), expected) << "trial " << trial;
  }
}

TEST_P(ScorerPrefixTest, OtherNumericsModes) {
  const std::vector<ScoreInput> inputs = AlikeInputs(config_, 5);
  const NumericsMode invariant = NumericsMode::kBatchInvariant;
  EXPECT_EQ(ScoreAll(*Load({.shards = 2, .mode = invariant}), inputs, FullOptions()),
            EachAlone(inputs, FullOptions(), invariant));
  // vanilla promises no bits, but every score.
  EXPECT_EQ(ScoreAll(*Load({.mode = NumericsMode::kVanilla}), inputs, FullOptions()).size(),
            inputs.size());
}

// Controls of the comparisons above: they would see a page that is shared too far.
TEST_P(ScorerPrefixTest, Control) {
  std::vector<ScoreInput> inputs = AlikeInputs(config_, 5);
  ScoreInput& input = inputs[4];
  const AllBits before = EachAlone({input}, ScoreOptions());
  for (const size_t changed : {size_t{47}, size_t{63}, size_t{69}}) {
    ScoreInput other = input;
    other.prompt[changed] = (other.prompt[changed] + 1) % static_cast<int32_t>(config_.vocab_size);
    EXPECT_NE(EachAlone({other}, ScoreOptions()), before) << changed;
  }
}

TEST_P(ScorerPrefixTest, OptionsOfSharersMayDiffer) {
  const std::vector<ScoreInput> inputs = AlikeInputs(config_, 5);
  const std::vector<ScoreOptions> all_options = AllOptions();
  std::vector<AllBits> expected;
  for (const ScoreOptions& options : all_options) expected.push_back(EachAlone(inputs, options));
  const auto scorer = Load({.max_batch_tokens = 16384});
  gate_.Close();
  const int arrivals = gate_.arrivals();
  const Submitted first = MakeJob({{.prompt = {4}, .completion = {5}}});
  ISOBIT_ASSERT_OK(scorer->Submit(first.job));
  ASSERT_TRUE(gate_.WaitForArrivals(arrivals + 1));
  std::vector<Submitted> jobs;  // all in the next pass
  for (const ScoreOptions& options : all_options) {
    jobs.push_back(MakeJob(inputs, options));
    ISOBIT_ASSERT_OK(scorer->Submit(jobs.back().job));
  }
  gate_.Open();
  for (size_t j = 0; j < jobs.size(); ++j) {
    ISOBIT_ASSERT_OK(jobs[j].collector->WaitUntilDone());
    AllBits bits;
    for (const auto& [index, score] : jobs[j].collector->scores()) bits.push_back(Bits(score));
    EXPECT_EQ(bits, expected[j]) << "options " << j;
  }
  EXPECT_EQ(gate_.arrivals(), arrivals + 2) << "not one pass";
}

TEST_P(ScorerPrefixTest, APromptsRowsAreComputedOnce) {
  const std::vector<int32_t> prompt = Random(96);
  std::vector<ScoreInput> inputs;
  for (int i = 0; i < 8; ++i) inputs.push_back({prompt, Random(24)});
  const int64_t total = TokensOf(inputs);
  const auto rows_of = [&](const ScorerSetup& setup, const ScoreOptions& options) {
    const auto scorer = Load(setup);
    rows_ = 0;
    ScoreAll(*scorer, inputs, options);
    const ScorerWork work = WorkOf(*scorer, total);
    EXPECT_EQ(work.tokens, total);
    EXPECT_EQ(work.tokens - work.shared_tokens, rows_) << "packing counts otherwise";
    return rows_.load();
  };
  EXPECT_EQ(rows_of({}, ScoreOptions()), 96 + 8 * 24);
  EXPECT_EQ(rows_of({}, FullOptions()), 96 + 8 * 24);
  EXPECT_EQ(rows_of({.shards = 2}, ScoreOptions()), 2 * 96 + 8 * 24);
  EXPECT_EQ(rows_of({.sharing = false}, ScoreOptions()), total);
  // Passes of at most 200 tokens: the prompt and four completions.
  EXPECT_EQ(rows_of({.max_batch_tokens = 200}, ScoreOptions()), 2 * (96 + 4 * 24));
}

TEST_P(ScorerPrefixTest, AJobThatEndsLeavesItsRowsToOthers) {
  const std::vector<ScoreInput> inputs = AlikeInputs(config_, 5);
  const AllBits expected = EachAlone(inputs, FullOptions());
  for (const bool in_pass : {false, true}) {
    const auto scorer = Load({});
    gate_.Close();
    const int arrivals = gate_.arrivals();
    const Submitted first = MakeJob({{.prompt = {4}, .completion = {5}}});
    ISOBIT_ASSERT_OK(scorer->Submit(first.job));
    ASSERT_TRUE(gate_.WaitForArrivals(arrivals + 1));
    const Submitted owner = MakeJob(inputs, FullOptions());
    const Submitted sharer = MakeJob(inputs, FullOptions());
    ISOBIT_ASSERT_OK(scorer->Submit(owner.job));
    ISOBIT_ASSERT_OK(scorer->Submit(sharer.job));
    const auto end = [&] { EXPECT_TRUE(owner.job->End(absl::CancelledError("gone"))); };
    if (in_pass) {
      on_pass_ = [&](int64_t rows) {
        if (rows > 2) end();  // not the first job's pass
      };
    } else {
      end();
    }
    gate_.Open();
    EXPECT_THAT(owner.collector->WaitUntilDone(), StatusIs(absl::StatusCode::kCancelled));
    ISOBIT_ASSERT_OK(sharer.collector->WaitUntilDone());
    AllBits bits;
    for (const auto& [index, score] : sharer.collector->scores()) bits.push_back(Bits(score));
    EXPECT_EQ(bits, expected) << (in_pass ? "in the pass" : "before it");
  }
}

}  // namespace
}  // namespace isobit
