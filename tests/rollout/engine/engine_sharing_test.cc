// Samples that share their prompt while requests are aborted, generation is paused and weights are
// switched: they get the bits that they have on an engine that shares nothing.
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "rollout/engine/engine.h"
#include "tests/rollout/engine/engine_fixture.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

class EngineSharingTest : public EngineDepthFixture {
 protected:
  // Six samples of a prompt of two and a half pages.
  static GenerationRequest Group(const std::string& id, uint64_t seed = 11) {
    GenerationRequest request = MakeRequest(id, seed);
    request.prompt = {3, 14, 15, 92, 65, 35, 89, 79, 32, 38};
    request.sampling.n = 6;
    return request;
  }

  std::unique_ptr<Engine> MakeSharing(bool share, const std::string& model = "v1") const {
    EngineOptions options = DefaultOptions();
    options.scheduler.share_prefixes = share;
    return MakeEngine(options, model);
  }

  static void ExpectSame(const RecordingSink& actual, const RecordingSink& expected) {
    ASSERT_EQ(actual.samples.size(), expected.samples.size());
    for (const auto& [index, sample] : actual.samples) {
      SCOPED_TRACE(index);
      ExpectSameTokens(sample, expected.samples.at(index));
      EXPECT_EQ(sample.versions, expected.samples.at(index).versions);
      ASSERT_TRUE(sample.end.has_value());
      EXPECT_EQ(sample.end->reason, expected.samples.at(index).end->reason);
    }
  }

  static std::shared_ptr<RecordingSink> RunAlone(Engine& engine, const GenerationRequest& request) {
    const auto sink = Submit(engine, request);
    Run(engine);
    return sink;
  }
};
INSTANTIATE_TEST_SUITE_P(Depth, EngineSharingTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

TEST_P(EngineSharingTest, ASampleMayStopWhileTheOthersGoOn) {
  GenerationRequest request = Group("r");
  const auto whole = RunAlone(*MakeSharing(false), request);
  // The first sample, whose page the others borrow, stops with its first token, then with its
  // second.
  for (const size_t at : {0u, 1u}) {
    request.sampling.stop_token_ids = {whole->samples[0].tokens[at]};
    const auto engine = MakeSharing(true);
    const auto shared = RunAlone(*engine, request);
    ExpectSame(*shared, *RunAlone(*MakeSharing(false), request));
    EXPECT_EQ(shared->samples[0].tokens.size(), at + 1);
    EXPECT_EQ(engine->load().num_used_pages, 0);
  }
}

TEST_P(EngineSharingTest, ARequestMayBeAbortedBesideItsTwin) {
  const auto expected = RunAlone(*MakeSharing(false), Group("b", 5));
  for (int steps = 0; steps < 5; ++steps) {
    const auto engine = MakeSharing(true);
    const auto aborted = Submit(*engine, Group("a"));
    const auto kept = Submit(*engine, Group("b", 5));
    for (int i = 0; i < steps; ++i) engine->Step();
    engine->Abort({"a"});
    Run(*engine);
    ExpectSame(*kept, *expected);
    EXPECT_EQ(aborted->samples[0].end->reason, FinishReason::kAbort);
    EXPECT_EQ(engine->load().num_used_pages, 0);
  }
}

TEST_P(EngineSharingTest, AsManySamplesAsARequestMayHave) {
  GenerationRequest request = Group("r");
  request.sampling.n = DefaultOptions().sampling.max_n;
  request.sampling.max_tokens = 3;
  const auto engine = MakeSharing(true);
  const auto shared = RunAlone(*engine, request);
  EXPECT_GT(shared->samples.size(), DefaultOptions().scheduler.max_running);
  ExpectSame(*shared, *RunAlone(*MakeSharing(false), request));
  const auto all = static_cast<int64_t>(request.sampling.n * request.prompt.size());
  EXPECT_EQ(engine->load().prompts.all, all);
  EXPECT_GT(engine->load().prompts.cached, all * 3 / 4);
}

TEST_P(EngineSharingTest, APauseKeepsSharedPages) {
  const auto engine = MakeSharing(true);
  const auto kept = Submit(*engine, Group("kept"));
  Steps(*engine, 2);
  const auto paused = Pause(*engine, PauseMode::kKeep);
  Run(*engine);
  ASSERT_TRUE(paused->has_value());
  EXPECT_EQ(engine->load().num_used_pages, 2 + 6);
  const auto late = Submit(*engine, Group("late", 5));
  ISOBIT_EXPECT_OK(engine->Continue());
  Run(*engine);
  const auto without = MakeSharing(false);
  ExpectSame(*kept, *RunAlone(*without, Group("kept")));
  ExpectSame(*late, *RunAlone(*without, Group("late", 5)));
}

TEST_P(EngineSharingTest, AnUpdateForgetsThePrefixes) {
  for (const InFlightMode mode :
       {InFlightMode::kAbort, InFlightMode::kWait, InFlightMode::kRecomputeKv}) {
    SCOPED_TRACE(static_cast<int>(mode));
    std::shared_ptr<RecordingSink> in_flight[2];
    for (const bool share : {false, true}) {
      const auto engine = MakeSharing(share);
      RunAlone(*engine, Group("before", 7));
      in_flight[share] = Submit(*engine, Group("in flight"));
      Steps(*engine, 2);
      // A pause fixes the token after which the update comes.
      if (mode != InFlightMode::kWait) Pause(*engine, PauseMode::kKeep);
      ISOBIT_EXPECT_OK(Update(*engine, {.model_path = "v2", .mode = mode}));
      ISOBIT_EXPECT_OK(engine->Continue());
      Run(*engine);
      if (!share) continue;
      const auto after = RunAlone(*engine, Group("after", 5));
      EXPECT_EQ(after->samples[0].end->num_cached_prompt_tokens,
                mode == InFlightMode::kRecomputeKv ? 8u : 0u)
          << "what the new weights have computed may be found";
      const auto fresh = RunAlone(*MakeSharing(false, "v2"), Group("after", 5));
      for (auto& [index, sample] : after->samples) {
        ExpectSameTokens(sample, fresh->samples[index]);
      }
      EXPECT_EQ(engine->load().num_used_pages, 0);
    }
    ExpectSame(*in_flight[1], *in_flight[0]);
  }
}

}  // namespace
}  // namespace isobit
