// What the engine generates, and that neither company nor layout changes a bit of it.
#include "rollout/engine.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/model/host_executor.h"
#include "kernels/oracle/oracle_ops.h"
#include "tests/rollout/engine_fixture.h"
#include "tests/support/bitwise.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::Not;
using testing_support::BitwiseEqual;
using testing_support::StatusIs;

class EngineTest : public EngineFixture {};

TEST_F(EngineTest, GeneratesTheSameBitsAloneAndInACrowd) {
  const auto engine = MakeEngine();
  const SampleResult alone = Generate(*engine, MakeRequest("alone"));
  EXPECT_EQ(alone.tokens.size(), 8u);
  EXPECT_EQ(alone.end->reason, FinishReason::kLength);
  EXPECT_EQ(alone.end->num_prompt_tokens, 5u);

  std::vector<std::shared_ptr<RecordingSink>> crowd;
  for (uint64_t i = 0; i < 5; ++i) {
    GenerationRequest other = MakeRequest(absl::StrCat("before", i), 100 + i);
    other.prompt.resize(1 + 7 * i, 33);
    other.sampling.max_tokens = static_cast<uint32_t>(3 + 5 * i);
    crowd.push_back(Submit(*engine, other));
    engine->Step();
  }
  const auto crowded = Submit(*engine, MakeRequest("crowded"));
  Submit(*engine, MakeRequest("after", 7));
  Run(*engine);
  ExpectSameTokens(crowded->samples[0], alone);
  EXPECT_EQ(engine->load().num_used_pages, 0);
}

TEST_F(EngineTest, GeneratesTheSameBitsAtAnyParallelSizeAndPageSize) {
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 40;
  request.sampling.top_p = 0.9f;
  const SampleResult expected = Generate(*MakeEngine(), request);
  for (const int tp : {1, 2, 8}) {
    EngineOptions options = DefaultOptions();
    options.runner.tensor_parallel_size = tp;
    SCOPED_TRACE(tp);
    ExpectSameTokens(Generate(*MakeEngine(options), request), expected);
  }
  for (const int32_t page_size : {1, 16, 128}) {
    EngineOptions options = DefaultOptions();
    options.runner.page_size = page_size;
    SCOPED_TRACE(page_size);
    ExpectSameTokens(Generate(*MakeEngine(options), request), expected);
  }
}

TEST_F(EngineTest, GeneratesTheBitsOfTheOracle) {
  EngineOptions options = DefaultOptions();
  options.runner.make_rank = MakeHostRank(MakeOracleOps);
  ExpectSameTokens(Generate(*MakeEngine(), MakeRequest("r")),
                   Generate(*MakeEngine(options), MakeRequest("r")));
}

// The control of the tests above: the sizes matter in a mode that promises nothing.
TEST_F(EngineTest, VanillaModeDependsOnTheParallelSize) {
  std::vector<float> logprobs[2];
  for (const int i : {0, 1}) {
    EngineOptions options = DefaultOptions();
    options.runner.mode = NumericsMode::kVanilla;
    options.runner.tensor_parallel_size = i == 0 ? 1 : 4;
    logprobs[i] = Generate(*MakeEngine(options), MakeRequest("r")).logprobs;
  }
  EXPECT_FALSE(BitwiseEqual(logprobs[0], logprobs[1]));
}

TEST_F(EngineTest, GeneratesTheSameBitsAfterPreemption) {
  std::vector<GenerationRequest> requests;
  for (uint64_t i = 0; i < 4; ++i) {
    requests.push_back(MakeRequest(absl::StrCat("r", i), i));
    requests.back().sampling.max_tokens = 24;
    requests.back().sampling.frequency_penalty = 0.5f;
  }
  const auto roomy = MakeEngine();
  std::vector<SampleResult> expected;
  for (const GenerationRequest& request : requests) expected.push_back(Generate(*roomy, request));

  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 12;  // each needs 8
  const auto tight = MakeEngine(options);
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (const GenerationRequest& request : requests) sinks.push_back(Submit(*tight, request));
  Run(*tight);
  uint32_t num_preemptions = 0;
  for (size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_TRUE(sinks[i]->samples[0].end.has_value());
    num_preemptions += sinks[i]->samples[0].end->num_preemptions;
    ExpectSameTokens(sinks[i]->samples[0], expected[i]);
  }
  EXPECT_GE(num_preemptions, 2u) << "the test must exercise preemption";
  EXPECT_EQ(tight->load().num_used_pages, 0);
}

TEST_F(EngineTest, SeedDecidesTheSample) {
  const auto engine = MakeEngine();
  const SampleResult first = Generate(*engine, MakeRequest("a", 1));
  ExpectSameTokens(Generate(*engine, MakeRequest("b", 1)), first);
  EXPECT_NE(Generate(*engine, MakeRequest("c", 2)).tokens, first.tokens);
}

TEST_F(EngineTest, ReportsTheSeedItChose) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("a");
  request.sampling.seed.reset();
  const SampleResult first = Generate(*engine, request);
  const SampleResult second = Generate(*engine, request);
  EXPECT_NE(first.end->seed, second.end->seed);
  request.sampling.seed = first.end->seed;
  ExpectSameTokens(Generate(*engine, request), first);
}

TEST_F(EngineTest, SamplesOfOneRequestDifferAndTheFirstIsThatOfAlone) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("n");
  const SampleResult alone = Generate(*engine, request);
  request.sampling.n = 20;  // more than run at once
  const auto sink = Submit(*engine, request);
  Run(*engine);
  ISOBIT_ASSERT_OK(sink->done.value());
  ASSERT_EQ(sink->samples.size(), 20u);
  std::set<std::vector<int32_t>> different;
  for (const auto& [index, sample] : sink->samples) {
    EXPECT_EQ(sample.tokens.size(), 8u);
    different.insert(sample.tokens);
  }
  EXPECT_EQ(different.size(), 20u);
  ExpectSameTokens(sink->samples[0], alone);
}

TEST_F(EngineTest, StopsAtAStopTokenButNotBeforeMinTokens) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  const SampleResult whole = Generate(*engine, request);
  const int32_t stop = whole.tokens[3];

  request.sampling.stop_token_ids = {stop};
  const SampleResult stopped = Generate(*engine, request);
  EXPECT_EQ(stopped.end->reason, FinishReason::kStop);
  EXPECT_EQ(stopped.end->stop_token, stop);
  EXPECT_EQ(stopped.tokens.back(), stop) << "the stop token is the last of the completion";
  EXPECT_LE(stopped.tokens.size(), 4u);

  request.sampling.min_tokens = 8;
  const SampleResult forced = Generate(*engine, request);
  EXPECT_EQ(forced.end->reason, FinishReason::kLength);
  EXPECT_THAT(forced.tokens, Each(Not(stop)));
}

TEST_F(EngineTest, StopsAtTheModelsEndUnlessIgnored) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  request.sampling.logit_bias = {{1, 1000.0f}};  // the end of sequence
  EXPECT_EQ(Generate(*engine, request).tokens.size(), 8u);
  request.sampling.ignore_eos = false;
  const SampleResult stopped = Generate(*engine, request);
  EXPECT_EQ(stopped.tokens, std::vector<int32_t>{1});
  EXPECT_EQ(stopped.end->reason, FinishReason::kStop);
  EXPECT_EQ(stopped.end->stop_token, 1);
}

TEST_F(EngineTest, PenaltiesReachTheSampler) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  request.sampling.temperature = 0.0f;
  request.sampling.max_tokens = 60;
  const SampleResult plain = Generate(*engine, request);
  const auto distinct = [](const SampleResult& result) {
    return std::set<int32_t>(result.tokens.begin(), result.tokens.end()).size();
  };
  request.sampling.repetition_penalty = 100.0f;
  EXPECT_GT(distinct(Generate(*engine, request)), distinct(plain));
  request.sampling.repetition_penalty = 1.0f;
  request.sampling.frequency_penalty = 2.0f;
  EXPECT_GT(distinct(Generate(*engine, request)), distinct(plain));
  request.sampling.frequency_penalty = 0.0f;
  request.sampling.presence_penalty = 2.0f;
  EXPECT_NE(Generate(*engine, request).tokens, plain.tokens);
}

TEST_F(EngineTest, GivesTopLogprobsMostLikelyFirst) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  request.sampling.logprobs = 5;
  const SampleResult result = Generate(*engine, request);
  for (size_t i = 0; i < result.tokens.size(); ++i) {
    ASSERT_EQ(result.top[i].size(), 5u);
    for (size_t k = 1; k < 5; ++k)
      EXPECT_GE(result.top[i][k - 1].logprob, result.top[i][k].logprob);
    for (const TokenLogProb& alternative : result.top[i]) {
      if (alternative.id != result.tokens[i]) continue;
      EXPECT_TRUE(BitwiseEqual(alternative.logprob, result.logprobs[i]));
    }
  }
  request.sampling.top_k = 2;
  for (const auto& top : Generate(*engine, request).top) {
    EXPECT_EQ(top.size(), 2u) << "the filter leaves no more candidates";
  }
}

TEST_F(EngineTest, RawLogprobsIgnoreTheSamplingParameters) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  const SampleResult plain = Generate(*engine, request);
  request.raw_logprobs = true;
  EXPECT_TRUE(BitwiseEqual(Generate(*engine, request).logprobs, plain.logprobs))
      << "without parameters both are the same";
  request.sampling.temperature = 0.5f;
  const SampleResult raw = Generate(*engine, request);
  request.raw_logprobs = false;
  const SampleResult processed = Generate(*engine, request);
  EXPECT_EQ(raw.tokens, processed.tokens);
  EXPECT_FALSE(BitwiseEqual(raw.logprobs, processed.logprobs));
}

TEST_F(EngineTest, CancelFreesPagesWithinOneStep) {
  const auto engine = MakeEngine();
  auto sink = std::make_shared<RecordingSink>();
  GenerationRequest request = MakeRequest("r");
  request.sampling.n = 3;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const uint64_t ticket, engine->Submit(request, sink));
  const auto other = Submit(*engine, MakeRequest("other", 5));
  engine->Step();
  engine->Step();
  EXPECT_EQ(engine->load().num_used_pages, 4 * 2);
  engine->Cancel(ticket, "gone");
  engine->Step();
  EXPECT_EQ(engine->load().num_used_pages, 2) << "those of the other request";
  ISOBIT_EXPECT_OK(sink->done.value());
  for (const auto& [index, sample] : sink->samples) {
    EXPECT_EQ(sample.tokens.size(), 2u) << "it returns what it has";
    EXPECT_EQ(sample.end->reason, FinishReason::kAbort);
    EXPECT_EQ(sample.end->abort_reason, "gone");
  }
  Run(*engine);
  EXPECT_EQ(other->samples[0].end->reason, FinishReason::kLength);
  engine->Cancel(ticket, "again");  // no longer known
}

TEST_F(EngineTest, AbortEndsByIdWithWhatThereIs) {
  const auto engine = MakeEngine();
  const auto a = Submit(*engine, MakeRequest("a"));
  const auto b = Submit(*engine, MakeRequest("b"));
  engine->Step();
  EXPECT_THAT(engine->Abort({"a", "unknown"}), testing::ElementsAre("a"));
  engine->Step();
  EXPECT_EQ(a->samples[0].end->reason, FinishReason::kAbort);
  EXPECT_EQ(a->samples[0].tokens.size(), 1u);
  EXPECT_FALSE(b->done.has_value());
  EXPECT_THAT(engine->AbortAll(), testing::ElementsAre("b"));
  EXPECT_THAT(engine->AbortAll(), testing::IsEmpty()) << "each is aborted once";
  engine->Step();
  EXPECT_EQ(b->samples[0].end->reason, FinishReason::kAbort);
}

TEST_F(EngineTest, TimeoutEndsARequestWithWhatItHas) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  request.timeout = std::chrono::milliseconds(30000);
  EXPECT_EQ(Generate(*engine, request).end->reason, FinishReason::kLength);
  request.timeout = std::chrono::milliseconds(50);
  request.sampling.max_tokens = 150;
  const auto sink = Submit(*engine, request);
  engine->Step();
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  engine->Step();
  ISOBIT_ASSERT_OK(sink->done.value());
  EXPECT_EQ(sink->samples[0].end->reason, FinishReason::kAbort);
  EXPECT_THAT(sink->samples[0].end->abort_reason, HasSubstr("timeout_ms"));
  EXPECT_EQ(sink->samples[0].tokens.size(), 1u);
  EXPECT_EQ(engine->load().num_used_pages, 0);
}

TEST_F(EngineTest, TheThreadWakesForAnExpiryWhilePaused) {
  const auto engine = MakeEngine();
  engine->Start();
  struct Notifying final : RequestSink {
    void OnToken(uint32_t, SampledToken) override {}
    void OnSampleEnd(uint32_t, SampleEnd) override {}
    void OnDone(const absl::Status&) override { done = true; }
    std::atomic<bool> done{false};
  };
  std::atomic<bool> paused{false};
  engine->Pause(PauseMode::kAbort, [&](const absl::StatusOr<PauseResult>&) { paused = true; });
  while (!paused) std::this_thread::yield();
  auto sink = std::make_shared<Notifying>();
  GenerationRequest request = MakeRequest("r");
  request.timeout = std::chrono::milliseconds(20);
  ISOBIT_ASSERT_OK(engine->Submit(request, sink));
  for (int i = 0; i < 1000 && !sink->done; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(sink->done);
}

TEST_F(EngineTest, RefusesRequestsItCannotQueue) {
  EngineOptions options = DefaultOptions();
  options.max_waiting_requests = 2;
  options.max_waiting_tokens = 100;
  auto sink = std::make_shared<RecordingSink>();
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto unloaded, Engine::Create(config_, options));
  EXPECT_THAT(unloaded->Submit(MakeRequest("r"), sink), StatusIs(absl::StatusCode::kUnavailable));

  const auto engine = MakeEngine(options);
  GenerationRequest large = MakeRequest("large");
  large.sampling.n = 24;  // 120 tokens: an empty queue takes it all the same
  ISOBIT_EXPECT_OK(engine->Submit(large, sink));
  EXPECT_THAT(engine->Submit(MakeRequest("large"), sink),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("large")));
  EXPECT_THAT(engine->Submit(MakeRequest("b"), sink),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("exceed 100")));
  Run(*engine);
  ISOBIT_EXPECT_OK(engine->Submit(MakeRequest("b"), std::make_shared<RecordingSink>()));
  ISOBIT_EXPECT_OK(engine->Submit(MakeRequest("c"), std::make_shared<RecordingSink>()));
  EXPECT_THAT(engine->Submit(MakeRequest("d"), sink),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("at most 2")));
  Run(*engine);
  EXPECT_EQ(Generate(*engine, MakeRequest("b")).tokens.size(), 8u) << "the id is free again";
}

TEST_F(EngineTest, NonFiniteLogitsFailTheirRequestAlone) {
  testing_support::TinyWeights weights = testing_support::RandomWeights(config_, 1);
  const size_t width = static_cast<size_t>(config_.hidden_size);
  weights.tensors["model.embed_tokens.weight"][50 * width + 3] = 0x7fc0;  // NaN
  weights.tensors["model.embed_tokens.weight"][51 * width + 3] = 0x7f80;  // infinity
  testing_support::WriteModel(config_, weights, root_.File("broken"));
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 8;  // so that pages with NaN keys are used again
  const auto engine = MakeEngine(options, "broken");

  GenerationRequest sound = MakeRequest("sound");
  sound.sampling.logit_bias = {{50, -1000.0f}, {51, -1000.0f}};
  const SampleResult expected = Generate(*MakeEngine(), sound);
  const auto before = Submit(*engine, sound);
  engine->Step();
  for (const uint32_t bad_token : {50u, 51u}) {
    GenerationRequest bad = MakeRequest("bad");
    bad.prompt[2] = bad_token;
    const auto sink = Submit(*engine, bad);
    engine->Step();
    EXPECT_THAT(sink->done.value(), StatusIs(absl::StatusCode::kInternal, HasSubstr("position 5")));
    EXPECT_TRUE(sink->samples.empty()) << "never a NaN logprob";
  }
  Run(*engine);
  ExpectSameTokens(before->samples[0], expected);
  ExpectSameTokens(Generate(*engine, sound), expected);

  GenerationRequest later = MakeRequest("later");  // draws token 50 at once, and reads it next
  later.sampling.logit_bias = {{50, 1000.0f}};
  later.sampling.n = 2;
  const auto sink = Submit(*engine, later);
  Run(*engine);
  EXPECT_THAT(sink->done.value(), StatusIs(absl::StatusCode::kInternal, HasSubstr("position 6")));
  EXPECT_EQ(sink->samples[0].tokens, std::vector<int32_t>{50});
  EXPECT_EQ(engine->load().num_used_pages, 0);
}

}  // namespace
}  // namespace isobit
