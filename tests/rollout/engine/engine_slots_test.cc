// A model with slots: whatever runs beside a request, is found in the cache, is preempted or comes
// back from sleep, its tokens and logprobs have the bits that it has alone.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rollout/engine/engine.h"
#include "tests/rollout/engine/engine_slots_fixture.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using EngineSlotsTest = EngineSlotsFixture;
INSTANTIATE_TEST_SUITE_P(Slots, EngineSlotsTest, AllRowsAndDepths(), RowsAndDepthName);

// What later tests compare with: tokens that were drawn one by one have the bits of a prompt. And
// the model differs from the one without slots, so that a state that is lost would be seen.
TEST_P(EngineSlotsTest, DecodingHasTheBitsOfAPrompt) {
  const GenerationRequest request = Request("r", Tokens(1, 6), 14);
  const Sinks whole = EachAlone({request});
  const SampleResult& drawn = whole[0]->samples[0];
  std::vector<GenerationRequest> rests;
  for (int drop = 1; drop < 14; ++drop) {
    GenerationRequest rest = request;
    rest.prompt.insert(rest.prompt.end(), drawn.tokens.begin(), drawn.tokens.begin() + drop);
    rest.sampling.max_tokens -= static_cast<uint32_t>(drop);
    rests.push_back(rest);
  }
  const Sinks actual = EachAlone(rests);
  for (int drop = 1; drop < 14; ++drop) {
    SCOPED_TRACE(drop);
    SampleResult expected;
    expected.tokens.assign(drawn.tokens.begin() + drop, drawn.tokens.end());
    expected.logprobs.assign(drawn.logprobs.begin() + drop, drawn.logprobs.end());
    ExpectSameTokens(actual[static_cast<size_t>(drop) - 1]->samples[0], expected);
  }
  const SampleResult plain = Generate(*EngineFixture::MakeEngine(Roomy(), "v1"), request);
  EXPECT_NE(plain.logprobs, drawn.logprobs) << "control";
}

TEST_P(EngineSlotsTest, ManyAtOnce) {
  const std::vector<GenerationRequest> requests = Strangers(12);
  const Sinks expected = EachAlone(requests);
  for (const int tp_size : {1, 2, 4}) {
    for (const int64_t batch_tokens : {int64_t{32}, int64_t{256}}) {
      EngineOptions options = Roomy();
      options.runner.tensor_parallel_size = tp_size;
      options.scheduler.max_batch_tokens = batch_tokens;
      ExpectSame(RunAll(*MakeEngine(options), requests), expected);
    }
  }
}

TEST_P(EngineSlotsTest, NewcomersBetweenTheSteps) {
  const std::vector<GenerationRequest> requests = Strangers(8);
  const Sinks expected = EachAlone(requests);
  const auto engine = MakeEngine(Roomy());
  Sinks actual;
  for (const GenerationRequest& request : requests) {
    actual.push_back(Submit(*engine, request));
    engine->Step();
  }
  Run(*engine);
  ExpectSame(actual, expected);
}

// Four pages of a prompt and three tokens more. The state at the end of a page is found, too.
TEST_P(EngineSlotsTest, PrefixesAreFound) {
  const std::vector<int32_t> prompt = Tokens(3, 19);
  const auto begins_with = [&](size_t count, uint32_t seed, size_t more) {
    std::vector<int32_t> tokens(prompt.begin(), prompt.begin() + static_cast<int64_t>(count));
    for (const int32_t id : Tokens(seed, more)) tokens.push_back(id);
    return tokens;
  };
  const std::vector<GenerationRequest> all_found = {
      Request("same", prompt), Request("longer", begins_with(19, 4, 6)),
      Request("other end", begins_with(17, 5, 6)), Request("long", begins_with(16, 6, 30))};
  const std::vector<GenerationRequest> perhaps_found = {
      Request("two pages", begins_with(8, 7, 9)),
      Request("three pages", begins_with(12, 8, 1)),
      Request("three pages and a half", begins_with(14, 9, 4)),
      Request("shorter", begins_with(16, 0, 0)),
      Request("a page", begins_with(4, 10, 1)),
      Request("half a page", begins_with(2, 11, 20))};
  for (const bool is_whole : {false, true}) {
    const GenerationRequest first = Request("first", begins_with(is_whole ? 16 : 19, 0, 0));
    const Sinks expected = EachAlone({first});
    for (const auto* requests : {&all_found, &perhaps_found}) {
      const Sinks expected_later = EachAlone(*requests);
      for (size_t r = 0; r < requests->size(); ++r) {
        SCOPED_TRACE((*requests)[r].id);
        const auto engine = MakeEngine(Roomy());
        ExpectSame(RunAll(*engine, {first}), expected);
        for (int time = 0; time < 2; ++time) {  // the second time finds what the first has left
          const Sinks actual = RunAll(*engine, {(*requests)[r]});
          ExpectSame(actual, {expected_later[r]});
          const uint32_t cached = actual[0]->samples[0].end->num_cached_prompt_tokens;
          if (requests == &all_found && (time == 1 || !is_whole)) {
            EXPECT_GT(cached, 0u);
          }
        }
      }
    }
  }
}

TEST_P(EngineSlotsTest, AlikeAtOnce) {
  const std::vector<int32_t> prompt = Tokens(3, 19);
  std::vector<GenerationRequest> requests;
  for (const size_t shared : {19u, 19u, 18u, 16u, 12u, 7u, 19u}) {
    GenerationRequest request = Request(std::to_string(requests.size()), prompt);
    request.prompt.resize(shared);
    const auto seed = static_cast<uint32_t>(50 + requests.size());
    for (const int32_t id : Tokens(seed, requests.size() % 3)) request.prompt.push_back(id);
    requests.push_back(request);
  }
  const Sinks expected = EachAlone(requests);
  for (const int tp_size : {1, 4}) {
    EngineOptions options = Roomy();
    options.runner.tensor_parallel_size = tp_size;
    const auto engine = MakeEngine(options);
    for (int time = 0; time < 3; ++time) ExpectSame(RunAll(*engine, requests), expected);
  }
}

TEST_P(EngineSlotsTest, ConversationsGoOn) {
  const auto engine = MakeEngine(Roomy());
  for (const uint32_t length : {3u, 4u, 5u, 6u, 7u, 8u, 9u}) {
    SCOPED_TRACE(length);
    GenerationRequest request = Request("turn", Tokens(length, 9), length);
    for (int turn = 0; turn < 4; ++turn) {
      const Sinks actual = RunAll(*engine, {request});
      ExpectSame(actual, EachAlone({request}));
      request = NextTurn(request, actual[0]->samples[0]);
    }
  }
}

// Their prompt's state is read by all of them, and each goes on in a slot of its own.
TEST_P(EngineSlotsTest, SamplesOfOneRequest) {
  for (const size_t length : {1u, 3u, 4u, 5u, 7u, 8u, 16u, 18u}) {
    const std::vector<GenerationRequest> requests = {Request("n", Tokens(7, length), 10, 4)};
    const Sinks expected = EachAlone(requests);
    EXPECT_NE(expected[0]->samples[0].tokens, expected[0]->samples[3].tokens);
    for (const bool share : {true, false}) {
      SCOPED_TRACE(testing::Message() << length << " tokens, share " << share);
      EngineOptions options = Roomy();
      options.scheduler.share_prefixes = share;
      const auto engine = MakeEngine(options);
      for (int time = 0; time < 2; ++time) ExpectSame(RunAll(*engine, requests), expected);
    }
    EngineOptions few = Roomy();  // they do not start together
    few.scheduler.max_running = 3;
    ExpectSame(RunAll(*MakeEngine(few), requests), expected);
  }
}

TEST_P(EngineSlotsTest, FewPages) {
  std::vector<GenerationRequest> requests;
  for (uint32_t i = 0; i < 6; ++i) {
    requests.push_back(Request(std::to_string(i), Tokens(i / 2, 10 + i / 2), 24, 1 + i % 2));
  }
  const Sinks expected = EachAlone(requests);
  for (const bool share : {true, false}) {
    EngineOptions options = DefaultOptions();
    options.runner.num_pages = 14;
    options.scheduler.share_prefixes = share;
    const auto engine = MakeEngine(options);
    const Sinks actual = RunAll(*engine, requests);
    ExpectSame(actual, expected);
    EXPECT_GT(SumOf(actual, &SampleEnd::num_preemptions), 0);
  }
}

TEST_P(EngineSlotsTest, FewSlots) {
  std::vector<GenerationRequest> requests = Strangers(8);
  for (uint32_t i = 0; i < 4; ++i) {
    requests.push_back(Request(std::to_string(i), Tokens(99, 8 + i), 16, 1 + i));
  }
  const Sinks expected = EachAlone(requests);
  for (const int32_t slots : {4, 6}) {
    for (const int32_t pages : {14, 300}) {
      for (const bool share : {true, false}) {
        SCOPED_TRACE(testing::Message() << slots << " slots, " << pages << " pages " << share);
        EngineOptions options = DefaultOptions();
        options.runner.num_slots = slots;
        options.runner.num_pages = pages;
        options.scheduler.share_prefixes = share;
        const auto engine = MakeEngine(options);
        // Again and again, so that a slot that does not come back would be missed.
        for (int time = 0; time < 2; ++time) ExpectSame(RunAll(*engine, requests), expected);
      }
    }
  }
}

TEST_P(EngineSlotsTest, AbortsGiveSlotsBack) {
  const std::vector<GenerationRequest> requests = Strangers(3);
  const Sinks expected = EachAlone(requests);
  EngineOptions options = Roomy();
  options.runner.num_slots = 8;
  const auto engine = MakeEngine(options);
  for (int steps = 0; steps < 12; ++steps) {
    const auto aborted = Submit(*engine, Request("aborted", Tokens(40, 10), 30, 2));
    const Sinks actual = RunAll(*engine, requests, [&](int step) {
      if (step == steps) engine->Abort({"aborted"});
    });
    ExpectSame(actual, expected);
    EXPECT_EQ(aborted->samples[0].end->reason, FinishReason::kAbort);
  }
}

TEST_P(EngineSlotsTest, PausesKeepStates) {
  const std::vector<GenerationRequest> requests = Strangers(5);
  const auto engine = MakeEngine(Roomy());
  const Sinks actual = RunAll(*engine, requests, [&](int step) {
    if (step % 3 == 1) {
      Pause(*engine, PauseMode::kKeep);
      Run(*engine);
      ISOBIT_EXPECT_OK(engine->Continue());
    }
  });
  ExpectSame(actual, EachAlone(requests));
}

TEST_P(EngineSlotsTest, NewWeightsFindNoOldState) {
  const std::vector<GenerationRequest> requests = {Request("r", Tokens(3, 19)),
                                                   Request("n", Tokens(4, 16), 8, 3)};
  const Sinks v1 = EachAlone(requests);
  const Sinks v2 = EachAlone(requests, "v2");
  EXPECT_NE(v1[0]->samples[0].logprobs, v2[0]->samples[0].logprobs);
  const auto engine = MakeEngine(Roomy());
  for (int time = 0; time < 2; ++time) ExpectSame(RunAll(*engine, requests), v1);
  ISOBIT_ASSERT_OK(Update(*engine, {.model_path = "v2"}));
  const Sinks first = RunAll(*engine, {requests[0]});
  ExpectSame(first, {v2[0]});
  EXPECT_EQ(first[0]->samples[0].end->num_cached_prompt_tokens, 0u);
  for (int time = 0; time < 2; ++time) ExpectSame(RunAll(*engine, requests), v2);
}

// A request in flight goes on under the new weights as if they had computed all its tokens.
TEST_P(EngineSlotsTest, AnUpdateRecomputesStates) {
  const GenerationRequest request = Request("r", Tokens(3, 10), 16);
  for (const int steps : {1, 3, 4, 6}) {
    SCOPED_TRACE(steps);
    const auto engine = MakeEngine(Roomy());
    RunAll(*engine, {request});  // what it leaves in the cache is of the old weights
    const auto sink = Submit(*engine, request);
    Steps(*engine, steps);
    Pause(*engine, PauseMode::kKeep);
    ISOBIT_ASSERT_OK(Update(*engine, {.model_path = "v2", .mode = InFlightMode::kRecomputeKv}));
    ISOBIT_ASSERT_OK(engine->Continue());
    Run(*engine);
    SampleResult actual = sink->samples[0];
    ASSERT_EQ(actual.tokens.size(), 16u);
    const auto old = std::count(actual.versions.begin(), actual.versions.end(), 1u);
    GenerationRequest rest = request;
    rest.prompt.insert(rest.prompt.end(), actual.tokens.begin(), actual.tokens.begin() + old);
    rest.sampling.max_tokens -= static_cast<uint32_t>(old);
    ASSERT_GT(rest.sampling.max_tokens, 0u);
    actual.tokens.erase(actual.tokens.begin(), actual.tokens.begin() + old);
    actual.logprobs.erase(actual.logprobs.begin(), actual.logprobs.begin() + old);
    ExpectSameTokens(actual, EachAlone({rest}, "v2")[0]->samples[0]);
  }
}

TEST_P(EngineSlotsTest, SleepForgetsStates) {
  const std::vector<GenerationRequest> requests = Strangers(5);
  const Sinks expected = EachAlone(requests);
  for (const SleepLevel level : {SleepLevel::kKvCache, SleepLevel::kKvCacheAndWeights}) {
    const auto engine = MakeEngine(Roomy());
    ExpectSame(RunAll(*engine, requests), expected);
    Sinks actual;
    for (const GenerationRequest& request : requests) actual.push_back(Submit(*engine, request));
    Steps(*engine, 4);
    std::optional<absl::StatusOr<SleepResult>> slept;
    engine->Sleep(level, PauseMode::kKeep,
                  [&](absl::StatusOr<SleepResult> r) { slept = std::move(r); });
    while (!slept) engine->Step();
    ISOBIT_ASSERT_OK(*slept);
    EXPECT_EQ(engine->memory().kv_cache, 0u);
    std::optional<absl::StatusOr<size_t>> woken;
    engine->WakeUp([&](absl::StatusOr<size_t> r) { woken = std::move(r); });
    while (!woken) engine->Step();
    ISOBIT_ASSERT_OK(*woken);
    Run(*engine);
    ExpectSame(actual, expected);
    ExpectSame(RunAll(*engine, requests), expected);
  }
}

}  // namespace
}  // namespace isobit
