// Guesses change nothing but speed: with drafters that are right, wrong or both, every token,
// logprob bit, top list, stop and count is that of a run without guesses.
#include "rollout/guesses/speculation.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/rollout/guesses/speculation_fixture.h"
#include "tests/support/bitwise.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

const DrafterCounts& CountsOf(const Engine& engine) {
  return static_cast<const Speculation&>(*engine.guesser()).counts(0);
}

// What a run of requests may use: pages of the KV cache, and rows a step.
#ifdef ISOBIT_SANITIZED
constexpr std::array<int32_t, 1> kPages = {14};
constexpr std::array<int64_t, 1> kBatchTokens = {40};
#else
constexpr std::array<int32_t, 3> kPages = {14, 40, 300};
constexpr std::array<int64_t, 2> kBatchTokens = {40, 256};
#endif

struct NamedDrafter {
  const char* name;
  IsRight is_right;
};
std::vector<NamedDrafter> Drafters() {
#ifdef ISOBIT_SANITIZED
  return {{"always wrong", Never()}, {"mostly right", Mixed(0.9)}};
#else
  return {{"always right", Always()},
          {"always wrong", Never()},
          {"right half of the time", Mixed(0.5)},
          {"mostly right", Mixed(0.9)},
          {"right up to 3", UpTo(3)},
          {"right up to 10", UpTo(10)}};
#endif
}

class SpeculationTest : public SpeculationFixture {
 protected:
  void Print(const char* what, const Comparison& c) const {
    std::printf(
        "%s, depth %d: %ld tokens compared, %ld differ, %ld other ends; %ld guesses, %ld "
        "tokens by right ones\n",
        what, depth_, c.tokens, c.different, c.other_ends, c.draft_tokens, c.accepted);
  }

  // before: of the old weights alone.
  void CompareAcrossUpdate(GenerationRequest request, const SampleResult& before,
                           const SampleResult& actual, InFlightMode mode, Comparison& sum) const {
    SampleResult expected = before;
    const auto old =
        static_cast<size_t>(std::ranges::count(actual.versions, before.versions.front()));
    const bool aborted = mode == InFlightMode::kAbort;
    EXPECT_EQ(actual.end->reason, aborted ? FinishReason::kAbort : FinishReason::kLength);
    EXPECT_EQ(actual.tokens.size() == old, mode != InFlightMode::kRecomputeKv);
    expected.tokens.resize(old);
    expected.logprobs.resize(old);
    if (mode == InFlightMode::kRecomputeKv) {
      const auto end = before.tokens.begin() + static_cast<std::ptrdiff_t>(old);
      request.prompt.insert(request.prompt.end(), before.tokens.begin(), end);
      request.sampling.max_tokens -= static_cast<uint32_t>(old);
      const SampleResult after = Generate(*MakeEngine(DefaultOptions(), "v2"), request);
      expected.tokens.insert(expected.tokens.end(), after.tokens.begin(), after.tokens.end());
      expected.logprobs.insert(expected.logprobs.end(), after.logprobs.begin(),
                               after.logprobs.end());
    }
    sum.tokens += static_cast<int64_t>(actual.tokens.size());
    sum.different += actual.tokens == expected.tokens &&
                             testing_support::BitwiseEqual(actual.logprobs, expected.logprobs)
                         ? 0
                         : 1;
    sum.draft_tokens += actual.end->num_draft_tokens;
    sum.accepted += actual.end->num_accepted_tokens;
  }
};
INSTANTIATE_TEST_SUITE_P(Depth, SpeculationTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

// INVARIANT: guesses, whoever makes them and however many, at any parallel size.
TEST_P(SpeculationTest, EveryDrafterGivesTheBitsOfNone) {
  const std::vector<GenerationRequest> requests = AllParameters(1);
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 64;
  const Results expected = RunAll(options, requests);
  const auto script = ScriptOf(requests, expected);
  for (const int tp_size : {1, 2, 4}) {
    options.runner.tensor_parallel_size = tp_size;
    for (const NamedDrafter& drafter : Drafters()) {
      SCOPED_TRACE(drafter.name);
      Comparison all;
      for (const size_t guesses : {1u, 2u, 5u, 16u}) {
        Compare(expected, RunAll(WithGuesses(options, script, drafter.is_right, guesses), requests),
                all);
      }
      EXPECT_TRUE(all.same());
      EXPECT_GT(all.draft_tokens, 0);
      Print(drafter.name, all);
    }
  }
}

TEST_P(SpeculationTest, ARightDrafterSavesSteps) {
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 31;
  const std::vector<GenerationRequest> requests = {request};
  const Results expected = RunAll(DefaultOptions(), requests);
  const auto script = ScriptOf(requests, expected);
  const auto engine = MakeEngine(WithGuesses(DefaultOptions(), script, Always(), 5));
  const auto sink = Submit(*engine, request);
  Run(*engine);
  // The prompt's step gives one token, each of the others six.
  EXPECT_EQ(engine->step_times().num_steps(), 1 + 5);
  EXPECT_EQ(sink->samples[0].end->num_accepted_tokens, 25u);
  EXPECT_EQ(sink->samples[0].end->num_draft_tokens, 25u);
  const DrafterCounts& counts = CountsOf(*engine);
  EXPECT_EQ(counts.drafts, 5);
  EXPECT_EQ(counts.draft_tokens, 25);
  EXPECT_EQ(counts.accepted[0], 5);
  EXPECT_EQ(counts.accepted[4], 5);
  EXPECT_EQ(counts.accepted[5], 0);
}

TEST_P(SpeculationTest, AWrongDrafterIsAskedRarely) {
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 150;
  const std::vector<GenerationRequest> requests = {request};
  const auto script = ScriptOf(requests, RunAll(DefaultOptions(), requests));
  const Results wrong = RunAll(WithGuesses(DefaultOptions(), script, Never(), 5), requests);
  // The acceptance goes from 0.75 to less than pays anywhere.
  EXPECT_LE(wrong[0]->samples[0].end->num_draft_tokens, 12u * 5);
}

// Two steps in flight: one with guesses in one of them is not in the other.
TEST_P(SpeculationTest, AFewWithPoorGuessesDoNotFallBehind) {
  const std::vector<GenerationRequest> requests = FirstWithGuesses(1, 5, 40);
  const auto script = ScriptOf(requests, RunAll(DefaultOptions(), requests));
  const auto steps = [&](const EngineOptions& options) {
    const auto engine = MakeEngine(options);
    for (const GenerationRequest& request : requests) Submit(*engine, request);
    Run(*engine);
    return engine->step_times().num_steps();
  };
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 64;
  EXPECT_EQ(steps(options), 40);
  EXPECT_LE(steps(WithGuesses(options, script, Mixed(0.3))), 42);
}

TEST_P(SpeculationTest, ARequestMayRefuseGuesses) {
  GenerationRequest request = MakeRequest("r");
  const std::vector<GenerationRequest> requests = {request};
  const auto script = ScriptOf(requests, RunAll(DefaultOptions(), requests));
  request.speculate = false;
  const Results refused = RunAll(WithGuesses(DefaultOptions(), script, Always()), {request});
  EXPECT_EQ(refused[0]->samples[0].end->num_draft_tokens, 0u);
  EXPECT_EQ(refused[0]->samples[0].tokens.size(), 8u);
}

// INVARIANT: groups of samples that share their prompt, few pages, a small budget.
TEST_P(SpeculationTest, SharedPromptsPreemptionAndSmallBudgets) {
  std::vector<GenerationRequest> requests = AllParameters(3, 24);
  for (GenerationRequest& request : requests) {
    request.prompt = {3, 14, 15, 92, 65, 35, 89, 79, 32, 38};
  }
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 40;
  const Results expected = RunAll(options, requests);
  const auto script = ScriptOf(requests, expected);
  int64_t num_preemptions = 0;
  for (const NamedDrafter& drafter : Drafters()) {
    SCOPED_TRACE(drafter.name);
    Comparison all;
    for (const int32_t pages : kPages) {
      for (const bool share : {false, true}) {
        for (const int64_t batch_tokens : kBatchTokens) {
          options.runner.num_pages = pages;
          options.scheduler.share_prefixes = share;
          options.scheduler.max_batch_tokens = batch_tokens;
          Compare(expected,
                  RunAll(WithGuesses(options, script, drafter.is_right), requests,
                         [&](Engine& engine, int) {
                           num_preemptions =
                               std::max(num_preemptions, engine.load().num_preemptions);
                         }),
                  all);
        }
      }
    }
    EXPECT_TRUE(all.same());
    EXPECT_GT(all.draft_tokens, 0);
    Print(drafter.name, all);
  }
  EXPECT_GT(num_preemptions, 10);
}

// Of two sequences with right guesses among ten, the step has room for one guess.
TEST_P(SpeculationTest, NobodyWaitsForGuessesThatFindNoRoom) {
  const std::vector<GenerationRequest> requests = FirstWithGuesses(2, 10, 40);
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 11;
  options.runner.num_pages = 200;
  const auto script = ScriptOf(requests, RunAll(options, requests));
  const auto engine = MakeEngine(WithGuesses(options, script, Always()));
  for (const GenerationRequest& request : requests) Submit(*engine, request);
  Run(*engine);
  EXPECT_LE(engine->step_times().num_steps(), 42);
}

// Of three with right guesses, the step has room for those of one.
TEST_P(SpeculationTest, NobodyWaitsForRoomThatOthersTake) {
  const std::vector<GenerationRequest> requests = FirstWithGuesses(3, 27, 60);
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 32;
  options.runner.num_pages = 800;
  const auto script = ScriptOf(requests, RunAll(options, requests));
  const auto engine = MakeEngine(WithGuesses(options, script, Always()));
  Results results;
  for (const GenerationRequest& request : requests) results.push_back(Submit(*engine, request));
  while (engine->Step()) {
    const size_t plain = results.back()->samples[0].tokens.size();
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_GE(results[i]->samples[0].tokens.size() + 2, plain) << i;
    }
  }
}

// Three sequences have guesses, always wrong, beside others that need a page now and then. As long
// as the others have no more tokens than fit without guesses, nobody is preempted.
TEST_P(SpeculationTest, GuessesPreemptNobody) {
  std::vector<GenerationRequest> requests;
  for (size_t i = 0; i < 6; ++i) {
    requests.push_back(MakeRequest(std::to_string(i), 11 + i));
    requests.back().prompt.resize(3 + i % 3);
    requests.back().sampling.max_tokens = 40;
  }
  const auto script = std::make_shared<Script>();
  for (const char* id : {"0", "1", "2"}) (*script)[{id, 0}] = {};
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 64;
  options.scheduler.share_prefixes = false;
  int64_t guesses = 0;
  // The most tokens of the last request before anybody is preempted.
  const auto tokens_of_last = [&](const EngineOptions& o, size_t most) {
    const auto engine = MakeEngine(o);
    Results results;
    for (const GenerationRequest& request : requests) results.push_back(Submit(*engine, request));
    while (engine->load().num_preemptions == 0 && results.back()->samples[0].tokens.size() < most &&
           engine->Step()) {
    }
    if (o.make_guesser) guesses += CountsOf(*engine).draft_tokens;
    return results.back()->samples[0].tokens.size();
  };
  for (int32_t pages = 14; pages < 50; ++pages) {
    options.runner.num_pages = pages;
    const size_t fits = tokens_of_last(options, 38);
    EXPECT_GE(tokens_of_last(WithGuesses(options, script, Never(), 16), fits), fits)
        << pages << " pages";
  }
  EXPECT_GT(guesses, 100);
}

TEST_P(SpeculationTest, PagesOfWrongGuessesAreFreed) {
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 60;
  const auto script = ScriptOf({request}, RunAll(DefaultOptions(), {request}));
  const auto engine = MakeEngine(WithGuesses(DefaultOptions(), script, Never(), 16));
  const auto sink = Submit(*engine, request);
  while (!sink->done) {
    // A pause waits for what is in flight.
    Pause(*engine, PauseMode::kKeep);
    Run(*engine);
    const auto tokens = static_cast<int32_t>(5 + sink->samples[0].tokens.size());
    EXPECT_LE(engine->load().num_used_pages, (tokens + 3) / 4);
    ISOBIT_EXPECT_OK(engine->Continue());
    engine->Step();
  }
  EXPECT_GT(sink->samples[0].end->num_draft_tokens, 16u);
}

// INVARIANT: what wrong guesses have left in a page is never found by others. A sample stops where
// its guess was wrong, at the end of a page too, and the conversation goes on.
TEST_P(SpeculationTest, ConversationsFindWhatWasDrawn) {
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 40;
  const SampleResult whole = Generate(*MakeEngine(), request);
  const auto script = std::make_shared<Script>();
  (*script)[{"r", 0}] = whole.tokens;
  Comparison all;
  int at_end_of_page = 0;
  for (const NamedDrafter& drafter : Drafters()) {
    for (size_t stop = 1; stop < 30; ++stop) {
      const auto end = whole.tokens.begin() + static_cast<std::ptrdiff_t>(stop);
      if (std::find(whole.tokens.begin(), end, *end) != end) continue;
      request.sampling.stop_token_ids = {*end};
      const auto engine = MakeEngine(WithGuesses(DefaultOptions(), script, drafter.is_right));
      EXPECT_EQ(Generate(*engine, request).tokens.size(), stop + 1);
      GenerationRequest next = MakeRequest("next");
      next.prompt.insert(next.prompt.end(), whole.tokens.begin(), end + 1);
      next.prompt.insert(next.prompt.end(), {7, 8});
      const auto found = Submit(*engine, next);
      Run(*engine);
      Compare(RunAll(DefaultOptions(), {next}), {found}, all);
      const auto turn = static_cast<uint32_t>(5 + stop + 1);
      EXPECT_GE(found->samples[0].end->num_cached_prompt_tokens, (turn - 1) / 4 * 4);
      at_end_of_page += turn % 4 == 0 ? 1 : 0;
    }
  }
  EXPECT_TRUE(all.same());
  EXPECT_GT(at_end_of_page, 4);
  Print("conversations", all);
}

// INVARIANT: pauses; updates of the weights, at a token that a pause fixes.
TEST_P(SpeculationTest, PausesAndUpdates) {
  const std::vector<GenerationRequest> requests = AllParameters(2);
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 64;
  options.runner.num_pages = 200;
  const Results whole = RunAll(options, requests);
  const auto script = ScriptOf(requests, whole);
  const auto pauses = [&](Engine& engine, int step) {
    if (step % 3 == 1) {
      Pause(engine, PauseMode::kKeep);
    } else if (step % 3 == 2) {
      ISOBIT_EXPECT_OK(engine.Continue());
    }
  };
  for (const NamedDrafter& drafter : Drafters()) {
    SCOPED_TRACE(drafter.name);
    Comparison all;
    Compare(whole, RunAll(WithGuesses(options, script, drafter.is_right), requests, pauses), all);
    EXPECT_TRUE(all.same());
    Print(drafter.name, all);
  }
}

// With guesses an update comes after other tokens than without, so each sample is compared with
// what the old weights draw up to it, and with what the new ones draw behind these tokens.
TEST_P(SpeculationTest, UpdatesOfTheWeights) {
  std::vector<GenerationRequest> requests = AllParameters(1);
  // Behind a prompt that has grown, these would count from its end.
  std::erase_if(requests, [](const GenerationRequest& r) {
    return r.id == "penalties" || r.id == "min_tokens" || r.id == "stops";
  });
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 64;
  const Results before = RunAll(options, requests);
  const auto script = ScriptOf(requests, before);
  for (const NamedDrafter& drafter : Drafters()) {
    for (const InFlightMode mode :
         {InFlightMode::kAbort, InFlightMode::kWait, InFlightMode::kRecomputeKv}) {
      SCOPED_TRACE(drafter.name);
      const auto engine = MakeEngine(WithGuesses(options, script, drafter.is_right));
      Results actual;
      for (const GenerationRequest& request : requests) actual.push_back(Submit(*engine, request));
      Steps(*engine, 3);
      if (mode != InFlightMode::kWait) Pause(*engine, PauseMode::kKeep);
      ISOBIT_EXPECT_OK(Update(*engine, {.model_path = "v2", .mode = mode}));
      ISOBIT_EXPECT_OK(engine->Continue());
      Run(*engine);
      Comparison all;
      for (size_t r = 0; r < requests.size(); ++r) {
        CompareAcrossUpdate(requests[r], before[r]->samples[0], actual[r]->samples[0], mode, all);
      }
      EXPECT_TRUE(all.same());
      Print(drafter.name, all);
    }
  }
}

}  // namespace
}  // namespace isobit
