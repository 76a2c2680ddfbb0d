// Requests with random parameters come, share prompts, go on as conversations, are aborted, paused,
// preempted and moved to other weights, while random drafters guess or a fast path draws: every
// token that was drawn is the one that the request gets alone, without.
#include <algorithm>
#include <cstdio>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "rollout/guesses/drafters.h"
#include "rollout/guesses/fast_path/fast_path.h"
#include "tests/rollout/guesses/noisy_ops.h"
#include "tests/rollout/guesses/speculation_fixture.h"
#include "tests/support/bitwise.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

#ifdef ISOBIT_SANITIZED
constexpr int kSteps = 600;
#else
constexpr int kSteps = 4000;
#endif

// Guesses tokens of a small set, any number of them.
class RandomSequence final : public SequenceDrafter {
 public:
  explicit RandomSequence(std::mt19937& random) : random_(random) {}
  void Guess(absl::Span<const int32_t> tokens, size_t most,
             std::vector<int32_t>& guesses) override {
    for (size_t count = random_() % (most + 1); count > 0; --count) {
      guesses.push_back(random_() % 2 == 0 ? tokens[random_() % tokens.size()]
                                           : static_cast<int32_t>(random_() % 40));
    }
  }

 private:
  std::mt19937& random_;
};
class RandomDrafter final : public Drafter {
 public:
  const char* name() const override { return "random"; }
  std::unique_ptr<SequenceDrafter> Begin(const Sequence& /*sequence*/) override {
    return std::make_unique<RandomSequence>(random_);
  }

 private:
  std::mt19937 random_{3};
};

class SpeculationSoakTest : public SpeculationFixture {
 protected:
  struct Live {
    GenerationRequest request;
    std::shared_ptr<RecordingSink> sink;
  };

  uint32_t Random(uint32_t below) { return static_cast<uint32_t>(random_() % below); }

  GenerationRequest RandomRequest(int number) {
    GenerationRequest request = MakeRequest(std::to_string(number), random_());
    request.prompt.assign(1 + Random(14), 7);
    for (size_t i = 9; i < request.prompt.size(); ++i) {
      request.prompt[i] = static_cast<int32_t>(Random(3));
    }
    if (!past_.empty() && Random(3) == 0) request.prompt = past_[Random(past_.size())];
    SamplingParams& sampling = request.sampling;
    sampling.n = 1 + Random(4);
    sampling.max_tokens = 1 + Random(40);
    sampling.temperature = Random(4) == 0 ? 0.0f : 0.2f + 0.2f * static_cast<float>(Random(5));
    sampling.top_k = Random(2) == 0 ? 0 : 1 + static_cast<int32_t>(Random(9));
    sampling.logprobs = Random(3);
    // Few tokens are likely, so that guesses hold.
    for (int32_t id = 0; id < 6; ++id) sampling.logit_bias.emplace_back(3 * id, 6.0f);
    if (Random(3) == 0) sampling.stop_token_ids = {static_cast<int32_t>(3 * Random(6))};
    if (Random(4) == 0) sampling.min_tokens = Random(sampling.max_tokens + 1);
    if (Random(4) == 0) sampling.frequency_penalty = 0.5f;
    if (Random(4) == 0) sampling.repetition_penalty = 1.2f;
    request.client = Random(2) == 0 ? "a" : "b";
    request.speculate = Random(8) != 0;
    request.deterministic = Random(3) != 0;
    if (Random(4) == 0) request.draft_tokens.assign(sampling.max_tokens, 3);
    return request;
  }

  // What has been drawn must be what the request gets alone, from its beginning on.
  void Check(const Live& live, bool has_fast_path) {
    if (live.request.deterministic || !has_fast_path) Compare(live);
    std::vector<int32_t> turn = live.request.prompt;
    const std::vector<int32_t>& said = live.sink->samples.begin()->second.tokens;
    turn.insert(turn.end(), said.begin(), said.end());
    if (turn.size() > 50) return;
    past_.push_back(std::move(turn));
    if (past_.size() > 8) past_.pop_front();
  }

  void Compare(const Live& live) {
    std::map<uint64_t, std::shared_ptr<RecordingSink>> alone;  // by the weights
    for (const uint64_t odd : {0u, 1u}) {
      alone[odd] = Submit(*alone_.at(odd), live.request);
      Run(*alone_.at(odd));
    }
    for (const auto& [sample, actual] : live.sink->samples) {
      const uint64_t first = actual.versions.empty() ? 1 : actual.versions.front();
      const SampleResult& expected = alone.at(first % 2)->samples[sample];
      // Behind a switch of weights, other tokens: SpeculationTest.UpdatesOfTheWeights.
      const auto count = static_cast<size_t>(std::ranges::count(actual.versions, first));
      ASSERT_LE(count, expected.tokens.size());
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(actual.tokens[i], expected.tokens[i]) << live.request.id << " token " << i;
        ASSERT_TRUE(testing_support::BitwiseEqual(actual.logprobs[i], expected.logprobs[i]));
        ASSERT_EQ(actual.top[i].size(), expected.top[i].size());
      }
      compared_ += static_cast<int64_t>(count);
      guesses_ += actual.end->num_draft_tokens;
      accepted_ += actual.end->num_accepted_tokens;
      const bool moved = count < actual.tokens.size();
      if (moved || actual.end->reason == FinishReason::kAbort) continue;
      ASSERT_EQ(actual.tokens.size(), expected.tokens.size());
      ASSERT_EQ(actual.end->reason, expected.end->reason);
      ASSERT_EQ(actual.end->stop_token, expected.end->stop_token);
    }
  }

  // Runs random operations with few pages.
  void Soak(EngineOptions options, bool has_fast_path);

  std::mt19937 random_{20261125};
  std::deque<std::vector<int32_t>> past_;              // of conversations
  std::map<uint64_t, std::unique_ptr<Engine>> alone_;  // with the weights of odd versions, and even
  int64_t compared_ = 0, guesses_ = 0, accepted_ = 0;
};
void SpeculationSoakTest::Soak(EngineOptions options, bool has_fast_path) {
  EngineOptions plain = DefaultOptions();
  plain.runner.tensor_parallel_size = 1;
  alone_[1] = MakeEngine(plain, "v1");
  alone_[0] = MakeEngine(plain, "v2");
  options.runner.tensor_parallel_size = 1;
  options.runner.num_pages = 36;
  options.scheduler.max_running = 12;
  options.scheduler.max_batch_tokens = 100;
  const auto engine = MakeEngine(options);
  std::string model = "v1";
  std::deque<Live> live;
  int number = 0;
  for (int step = 0; step < kSteps; ++step) {
    if (Random(4) == 0 && live.size() < 8) {
      const GenerationRequest request = RandomRequest(number++);
      live.push_back({request, Submit(*engine, request)});
    }
    if (Random(60) == 0 && !live.empty()) engine->Abort({live[Random(live.size())].request.id});
    if (Random(50) == 0) {
      Pause(*engine, PauseMode::kKeep);
      Run(*engine);
      ISOBIT_EXPECT_OK(engine->Continue());
    }
    if (Random(200) == 0) {
      model = model == "v1" ? "v2" : "v1";
      ISOBIT_EXPECT_OK(Update(*engine, {.model_path = model, .mode = InFlightMode::kRecomputeKv}));
    }
    engine->Step();
    std::erase_if(live, [&](const Live& l) {
      if (!l.sink->done) return false;
      Check(l, has_fast_path);
      return true;
    });
    if (HasFatalFailure()) return;
  }
  Run(*engine);
  for (const Live& l : live) Check(l, has_fast_path);
  std::printf(
      "depth %d: %d requests, %ld tokens compared, %ld guesses, %ld tokens by right ones, "
      "%ld preemptions\n",
      depth_, number, compared_, guesses_, accepted_, engine->load().num_preemptions);
  EXPECT_GT(compared_, kSteps);
  EXPECT_GT(accepted_, kSteps / 8);
  EXPECT_GT(engine->load().num_preemptions, kSteps / 100);
  EXPECT_EQ(engine->load().num_used_pages, 0);
  EXPECT_EQ(engine->load().num_waiting_tokens, 0);
}

INSTANTIATE_TEST_SUITE_P(Depth, SpeculationSoakTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

TEST_P(SpeculationSoakTest, RandomGuessesChangeNoBit) {
  EngineOptions options = DefaultOptions();
  const auto make_drafters = [] {
    auto drafters = (*DraftersOf("history,lookup", {.history_bytes = 1 << 16}))();
    drafters.push_back(std::make_unique<RandomDrafter>());
    return drafters;
  };
  options.make_guesser = Speculation::Maker(
      {.make_drafters = make_drafters, .max_guesses = 6, .costs = FreeGuesses()});
  Soak(options, /*has_fast_path=*/false);
}

TEST_P(SpeculationSoakTest, AFastPathChangesNoBit) {
  EngineOptions options = DefaultOptions();
  options.runner.make_rank =
      RankOf([] { return MakeCpuBackend({}); }, [] { return std::make_unique<NoisyOps>(0.05f); });
  options.make_guesser = FastPath::Maker({.window = 4, .group = 2});
  Soak(options, /*has_fast_path=*/true);
}

}  // namespace
}  // namespace isobit
