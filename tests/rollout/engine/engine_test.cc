// What the engine generates, and that neither other requests nor the layout changes a bit of it.
#include "rollout/engine/engine.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/rollout/engine/engine_fixture.h"
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

class EngineTest : public EngineDepthFixture {};
INSTANTIATE_TEST_SUITE_P(Depth, EngineTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

TEST_P(EngineTest, GeneratesTheSameBitsAloneAndInACrowd) {
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

TEST_P(EngineTest, GeneratesTheSameBitsAtAnyParallelSizeAndPageSize) {
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

TEST_P(EngineTest, GeneratesTheBitsOfTheOracle) {
  EngineOptions options = DefaultOptions();
  options.runner.make_rank = RankOf([] { return MakeOracleBackend(); });
  ExpectSameTokens(Generate(*MakeEngine(), MakeRequest("r")),
                   Generate(*MakeEngine(options), MakeRequest("r")));
}

// The control test of those above: in a mode that does not keep the contract, sizes matter.
TEST_P(EngineTest, VanillaModeDependsOnTheParallelSize) {
  std::vector<float> logprobs[2];
  for (const int i : {0, 1}) {
    EngineOptions options = DefaultOptions();
    options.runner.make_rank =
        RankOf([] { return MakeCpuBackend({.mode = NumericsMode::kVanilla}); });
    options.runner.tensor_parallel_size = i == 0 ? 1 : 4;
    logprobs[i] = Generate(*MakeEngine(options), MakeRequest("r")).logprobs;
  }
  EXPECT_FALSE(BitwiseEqual(logprobs[0], logprobs[1]));
}

TEST_P(EngineTest, GeneratesTheSameBitsAfterPreemption) {
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

TEST_P(EngineTest, SeedDecidesTheSample) {
  const auto engine = MakeEngine();
  const SampleResult first = Generate(*engine, MakeRequest("a", 1));
  ExpectSameTokens(Generate(*engine, MakeRequest("b", 1)), first);
  EXPECT_NE(Generate(*engine, MakeRequest("c", 2)).tokens, first.tokens);
}

TEST_P(EngineTest, ReportsTheSeedItChose) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("a");
  request.sampling.seed.reset();
  const SampleResult first = Generate(*engine, request);
  const SampleResult second = Generate(*engine, request);
  EXPECT_NE(first.end->seed, second.end->seed);
  request.sampling.seed = first.end->seed;
  ExpectSameTokens(Generate(*engine, request), first);
}

TEST_P(EngineTest, SamplesOfOneRequestDifferAndTheFirstIsThatOfAlone) {
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

TEST_P(EngineTest, StopsAtAStopTokenButNotBeforeMinTokens) {
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

TEST_P(EngineTest, StopsAtTheModelsEndUnlessIgnored) {
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

TEST_P(EngineTest, PenaltiesReachTheSampler) {
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

TEST_P(EngineTest, GivesTopLogprobsMostLikelyFirst) {
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

TEST_P(EngineTest, RawLogprobsIgnoreTheSamplingParameters) {
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

TEST_P(EngineTest, CancelFreesPagesWithinOneStep) {
  const auto engine = MakeEngine();
  auto sink = std::make_shared<RecordingSink>();
  GenerationRequest request = MakeRequest("r");
  request.sampling.n = 3;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const uint64_t ticket, engine->Submit(request, sink));
  const auto other = Submit(*engine, MakeRequest("other", 5));
  Steps(*engine, 2);
  EXPECT_EQ(engine->load().num_used_pages, 1 + 4) << "a shared one, and each its own";
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

TEST_P(EngineTest, AbortForAClientEndsNobodyElsesRequests) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("a");
  request.client = "one";
  const auto a = Submit(*engine, request);
  EXPECT_THAT(engine->Abort({"a"}, "two"), testing::IsEmpty());
  Steps(*engine, 1);
  EXPECT_FALSE(a->done.has_value());
  EXPECT_THAT(engine->Abort({"a"}, "one"), testing::ElementsAre("a"));
}

TEST_P(EngineTest, AbortEndsByIdWithWhatThereIs) {
  const auto engine = MakeEngine();
  const auto a = Submit(*engine, MakeRequest("a"));
  const auto b = Submit(*engine, MakeRequest("b"));
  Steps(*engine, 1);
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

TEST_P(EngineTest, TimeoutEndsARequestWithWhatItHas) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  request.timeout = std::chrono::milliseconds(30000);
  EXPECT_EQ(Generate(*engine, request).end->reason, FinishReason::kLength);
  request.sampling.max_tokens = 150;
  std::shared_ptr<RecordingSink> sink;
  // Again with more time if the machine had none to spare for the one step.
  for (std::chrono::milliseconds timeout(50); sink == nullptr || sink->samples[0].tokens.empty();
       timeout *= 4) {
    ASSERT_LT(timeout, std::chrono::minutes(2));
    request.timeout = timeout;
    sink = Submit(*engine, request);
    Steps(*engine, 1);
    std::this_thread::sleep_for(timeout);
    engine->Step();
    ISOBIT_ASSERT_OK(sink->done.value());
  }
  EXPECT_EQ(sink->samples[0].end->reason, FinishReason::kAbort);
  EXPECT_THAT(sink->samples[0].end->abort_reason, HasSubstr("timeout_ms"));
  EXPECT_EQ(sink->samples[0].tokens.size(), 1u);
  EXPECT_EQ(engine->load().num_used_pages, 0);
}

TEST_P(EngineTest, TheThreadWakesForAnExpiryWhilePaused) {
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
  for (int i = 0; i < 6000 && !sink->done; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(sink->done);
}

TEST_P(EngineTest, StopDoesNotWaitForRequests) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 190;
  request.sampling.n = 16;
  const auto sink = Submit(*engine, request);
  engine->Start();
  while (engine->load().num_used_pages == 0) std::this_thread::yield();
  engine->Stop();
  EXPECT_FALSE(sink->done.has_value());
}

TEST_P(EngineTest, RefusesRequestsItCannotQueue) {
  EngineOptions options = DefaultOptions();
  options.max_waiting_requests = 2;
  options.max_waiting_tokens = 100;
  auto sink = std::make_shared<RecordingSink>();
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto unloaded, Engine::Create(config_, options));
  EXPECT_THAT(unloaded->Submit(MakeRequest("r"), sink), StatusIs(absl::StatusCode::kUnavailable));

  const auto engine = MakeEngine(options);
  GenerationRequest large = MakeRequest("large");
  large.sampling.n = 24;  // 120 tokens, over the bound: an empty queue takes it even so
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

// Requests of every kind, each alone at depth 1 and all together, on few pages.
TEST_P(EngineTest, GeneratesTheSameBitsAtAnyDepth) {
  std::vector<GenerationRequest> requests;
  for (uint64_t i = 0; i < 12; ++i) {
    GenerationRequest request = MakeRequest(absl::StrCat("r", i), i);
    request.prompt.resize(1 + i % 7, 20);
    request.sampling.max_tokens = static_cast<uint32_t>(1 + 3 * i);
    request.sampling.logprobs = i % 3;
    if (i % 2 == 1) request.sampling.stop_token_ids = {1, 5, 9, 17, 30, 44, 60, 71, 90};
    if (i % 4 == 3) request.sampling.min_tokens = 4;
    if (i % 3 == 1) request.sampling.logit_bias = {{9, 3.0f}, {40, -2.0f}};
    if (i % 5 == 2) request.sampling.repetition_penalty = 1.5f;
    if (i % 6 == 5) request.sampling.n = 3;
    requests.push_back(request);
  }
  depth_ = 1;
  const auto reference = MakeEngine();
  depth_ = GetParam();
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 24;
  options.scheduler.max_running = 6;
  const auto engine = MakeEngine(options);
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (const GenerationRequest& request : requests) {
    sinks.push_back(Submit(*engine, request));
    engine->Step();
  }
  Run(*engine);
  uint32_t num_preemptions = 0;
  size_t num_stops = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    const auto alone = Submit(*reference, requests[i]);
    Run(*reference);
    ISOBIT_ASSERT_OK(sinks[i]->done.value());
    ASSERT_EQ(sinks[i]->samples.size(), requests[i].sampling.n);
    for (const auto& [index, sample] : sinks[i]->samples) {
      const SampleResult& expected = alone->samples[index];
      ExpectSameTokens(sample, expected);
      EXPECT_EQ(sample.end->reason, expected.end->reason);
      EXPECT_EQ(sample.end->stop_token, expected.end->stop_token);
      ASSERT_EQ(sample.top.size(), expected.top.size());
      for (size_t t = 0; t < sample.top.size(); ++t) {
        ASSERT_EQ(sample.top[t].size(), expected.top[t].size());
        for (size_t k = 0; k < sample.top[t].size(); ++k) {
          EXPECT_EQ(sample.top[t][k].id, expected.top[t][k].id);
          EXPECT_TRUE(BitwiseEqual(sample.top[t][k].logprob, expected.top[t][k].logprob));
        }
      }
      num_preemptions += sample.end->num_preemptions;
      num_stops += sample.end->reason == FinishReason::kStop ? 1 : 0;
    }
  }
  EXPECT_GE(num_preemptions, 1u) << "the test must exercise preemption";
  EXPECT_GE(num_stops, 3u) << "and stops";
  EXPECT_EQ(engine->load().num_used_pages, 0);
}

TEST_P(EngineTest, ReusesPagesWhileAStepInFlightWritesThem) {
  GenerationRequest next = MakeRequest("next", 5);
  next.sampling.max_tokens = 4;
  GenerationRequest stopping = MakeRequest("stopping");
  const SampleResult expected = Generate(*MakeEngine(), next);
  stopping.sampling.stop_token_ids = {Generate(*MakeEngine(), stopping).tokens[1]};

  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 4;
  const auto engine = MakeEngine(options);
  const auto first = Submit(*engine, stopping);
  engine->Step();
  next.prompt.assign(10, 7);  // 3 pages, of which one is the first's
  const auto second = Submit(*engine, next);
  while (!first->done) engine->Step();
  EXPECT_EQ(engine->load().num_waiting_requests, 1u);
  engine->Step();
  EXPECT_EQ(engine->load().num_waiting_requests, 0u) << "at once, the step in flight or not";
  Run(*engine);
  ExpectSameTokens(second->samples[0], Generate(*MakeEngine(), next));
  EXPECT_EQ(expected.tokens.size(), second->samples[0].tokens.size());
}

// The deferred rank and the sanitizers check it.
TEST_P(EngineTest, StepsInFlightOutliveTheirRequests) {
  const auto engine = MakeEngine();
  const SampleResult expected = Generate(*engine, MakeRequest("r"));
  const auto running = Submit(*engine, MakeRequest("r"));
  for (int i = 0; i < 6; ++i) {
    GenerationRequest request = MakeRequest(absl::StrCat("cancelled", i));
    request.sampling.n = 2;
    request.sampling.logprobs = 3;
    request.sampling.min_tokens = 6;
    request.sampling.stop_token_ids = {4, 5, 6};
    request.sampling.logit_bias = {{7, 1.0f}};
    if (i % 2 == 1) request.sampling.presence_penalty = 0.5f;
    const auto ticket = engine->Submit(request, std::make_shared<RecordingSink>());
    ISOBIT_ASSERT_OK(ticket);
    engine->Step();
    engine->Cancel(*ticket, "gone");
  }
  Run(*engine);
  ExpectSameTokens(running->samples[0], expected);
  EXPECT_EQ(engine->load().num_used_pages, 0);
}

TEST_P(EngineTest, NewcomersDoNotDrainThePipeline) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 20;
  const auto sink = Submit(*engine, request);
  Steps(*engine, 1);
  for (size_t i = 1; i < 12; ++i) {
    EXPECT_EQ(sink->samples[0].tokens.size(), i);
    Submit(*engine, MakeRequest(absl::StrCat("newcomer", i)));
    engine->Step();
  }
}

TEST_P(EngineTest, PenaltiesWaitForTheirTokensAndStallNobody) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("plain");
  request.sampling.max_tokens = 20;
  const auto plain = Submit(*engine, request);
  request.id = "penalised";
  request.sampling.frequency_penalty = 0.5f;
  const auto penalised = Submit(*engine, request);
  Steps(*engine, 12);
  EXPECT_EQ(plain->samples[0].tokens.size(), 12u);
  EXPECT_EQ(penalised->samples[0].tokens.size(), GetParam() == 1 ? 12u : 6u);
}

TEST_P(EngineTest, NonFiniteLogitsFailTheirRequestAlone) {
  testing_support::TinyWeights weights = testing_support::RandomWeights(config_, 1);
  const size_t width = static_cast<size_t>(config_.hidden_size);
  weights.tensors["model.embed_tokens.weight"][50 * width + 3] = 0x7fc0;  // NaN
  weights.tensors["model.embed_tokens.weight"][51 * width + 3] = 0x7f80;  // infinity
  testing_support::WriteModel(config_, weights, root_.File("broken"));
  EngineOptions options = DefaultOptions();
  options.load_policy.allow_nonfinite = true;
  options.runner.num_pages = 8;  // so that pages with NaN keys are used again
  const auto engine = MakeEngine(options, "broken");

  GenerationRequest sound = MakeRequest("sound");
  sound.sampling.logit_bias = {{50, -1000.0f}, {51, -1000.0f}};
  const SampleResult expected = Generate(*MakeEngine(), sound);
  const auto before = Submit(*engine, sound);
  engine->Step();
  for (const int32_t bad_token : {50, 51}) {
    GenerationRequest bad = MakeRequest("bad");
    bad.prompt[2] = bad_token;
    const auto sink = Submit(*engine, bad);
    Steps(*engine, 1);
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

// At depth 2, a sequence may be preempted before its row of a step in flight is collected.
TEST_P(EngineTest, NonFiniteLogitsOfAPreemptedSequenceLeaveNothingInTheQueue) {
  testing_support::TinyWeights weights = testing_support::RandomWeights(config_, 1);
  const size_t width = static_cast<size_t>(config_.hidden_size);
  weights.tensors["model.embed_tokens.weight"][50 * width + 3] = 0x7fc0;  // NaN
  testing_support::WriteModel(config_, weights, root_.File("broken"));
  EngineOptions options = DefaultOptions();
  options.load_policy.allow_nonfinite = true;
  options.runner.num_pages = 4;  // the two begin with two each
  for (int head_start = 0; head_start < 6; ++head_start) {
    const auto engine = MakeEngine(options, "broken");
    GenerationRequest sound = MakeRequest("sound");
    sound.sampling.logit_bias = {{50, -1000.0f}};
    const auto first = Submit(*engine, sound);
    for (int i = 0; i < head_start; ++i) engine->Step();
    GenerationRequest bad = MakeRequest("bad");
    bad.prompt[2] = 50;
    const auto second = Submit(*engine, bad);
    Run(*engine);
    ISOBIT_EXPECT_OK(first->done.value());
    EXPECT_THAT(second->done.value(), StatusIs(absl::StatusCode::kInternal));
    EXPECT_EQ(engine->load().num_waiting_tokens, 0) << "head start " << head_start;
    EXPECT_EQ(engine->load().num_used_pages, 0);
  }
}

}  // namespace
}  // namespace isobit
