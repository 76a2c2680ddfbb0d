// A model with slots under guesses: after a wrong one the state is again that of the tokens drawn,
// and no bit changes, whoever guesses.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "rollout/guesses/fast_path/fast_path.h"
#include "rollout/guesses/speculation.h"
#include "tests/rollout/engine/engine_slots_fixture.h"
#include "tests/rollout/guesses/noisy_ops.h"
#include "tests/rollout/guesses/scripted_drafter.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

class GuessedSlotsTest : public EngineSlotsFixture {
 protected:
  // Strangers, and samples of one prompt.
  static std::vector<GenerationRequest> Requests() {
    std::vector<GenerationRequest> requests = Strangers(8, 24);
    for (uint32_t i = 0; i < 2; ++i) {
      requests.push_back(Request(std::to_string(i), Tokens(77, 10 + 2 * i), 24, 3));
    }
    return requests;
  }

  static std::shared_ptr<const Script> ScriptOf(const std::vector<GenerationRequest>& requests,
                                                const Sinks& sinks) {
    auto script = std::make_shared<Script>();
    for (size_t r = 0; r < requests.size(); ++r) {
      for (const auto& [sample, result] : sinks[r]->samples) {
        (*script)[{requests[r].id, sample}] = result.tokens;
      }
    }
    return script;
  }

  EngineOptions Guessing(EngineOptions options, const std::shared_ptr<const Script>& script,
                         const IsRight& is_right, size_t most) const {
    options.make_guesser = Speculation::Maker(Scripted(script, is_right, config_.vocab_size, most));
    return options;
  }

  EngineOptions FastPathOf(EngineOptions options, MakeHostOps make_ops, size_t window,
                           size_t together) const {
    options.runner.make_rank = RankOf([] { return MakeCpuBackend({}); }, std::move(make_ops));
    options.make_guesser = FastPath::Maker({.window = window, .group = together});
    return options;
  }

  // Runs the requests, then the next turn of each, which may find what the first has left.
  void ExpectSameTurns(const EngineOptions& options, const std::vector<GenerationRequest>& requests,
                       const Sinks& expected, const std::vector<GenerationRequest>& next,
                       const Sinks& expected_next, Sinks& actual) const {
    const auto engine = MakeEngine(options);
    actual = RunAll(*engine, requests);
    ExpectSame(actual, expected);
    ExpectSame(RunAll(*engine, next), expected_next);
  }

  static std::vector<GenerationRequest> NextTurns(const std::vector<GenerationRequest>& requests,
                                                  const Sinks& said) {
    std::vector<GenerationRequest> next;
    for (size_t r = 0; r < requests.size(); ++r) {
      next.push_back(NextTurn(requests[r], said[r]->samples[0]));
      next.back().sampling.max_tokens = 6;
    }
    return next;
  }
};
INSTANTIATE_TEST_SUITE_P(Slots, GuessedSlotsTest, AllRowsAndDepths(), RowsAndDepthName);

TEST_P(GuessedSlotsTest, Speculation) {
  const std::vector<GenerationRequest> requests = Requests();
  const Sinks expected = EachAlone(requests);
  const auto script = ScriptOf(requests, expected);
  const std::vector<GenerationRequest> next = NextTurns(requests, expected);
  const Sinks expected_next = EachAlone(next);
  for (const int tp_size : {1, 4}) {
    for (const size_t most : {1u, 3u, 6u, 16u}) {
      SCOPED_TRACE(testing::Message() << tp_size << " ranks, at most " << most << " guesses");
      EngineOptions options = Roomy();
      options.scheduler.max_running = 64;
      options.runner.tensor_parallel_size = tp_size;
      Sinks actual;
      ExpectSameTurns(Guessing(options, script, Mixed(0.8), most), requests, expected, next,
                      expected_next, actual);
      const int64_t guessed = SumOf(actual, &SampleEnd::num_draft_tokens);
      const int64_t accepted = SumOf(actual, &SampleEnd::num_accepted_tokens);
      EXPECT_GT(accepted, 0);
      EXPECT_GT(guessed, accepted);
    }
  }
}

TEST_P(GuessedSlotsTest, DraftersThatAreAlwaysRightOrWrong) {
  const std::vector<GenerationRequest> requests = Requests();
  const Sinks expected = EachAlone(requests);
  const auto script = ScriptOf(requests, expected);
  for (const bool is_right : {true, false}) {
    for (const bool share : {true, false}) {
      EngineOptions options = Roomy();
      options.scheduler.max_running = 64;
      options.scheduler.share_prefixes = share;
      const Sinks actual = RunAll(
          *MakeEngine(Guessing(options, script, is_right ? Always() : Never(), 5)), requests);
      ExpectSame(actual, expected);
      EXPECT_GT(SumOf(actual, &SampleEnd::num_draft_tokens), 0);
      EXPECT_EQ(SumOf(actual, &SampleEnd::num_accepted_tokens) > 0, is_right);
    }
  }
}

TEST_P(GuessedSlotsTest, SpeculationWithFewPagesOrSlots) {
  const std::vector<GenerationRequest> requests = Requests();
  const Sinks expected = EachAlone(requests);
  const auto script = ScriptOf(requests, expected);
  for (const int32_t pages : {14, 300}) {
    for (const int32_t slots : {4, 6, 12, 0}) {
      SCOPED_TRACE(testing::Message() << pages << " pages, " << slots << " slots");
      EngineOptions options = DefaultOptions();
      options.runner.num_pages = pages;
      options.runner.num_slots = slots;
      const Sinks actual = RunAll(*MakeEngine(Guessing(options, script, Mixed(0.8), 5)), requests);
      ExpectSame(actual, expected);
      if (pages == 14 && slots == 0) {
        EXPECT_GT(SumOf(actual, &SampleEnd::num_preemptions), 0);
      }
    }
  }
}

// A sample that stops at a token behind right guesses, whose step has computed wrong ones, too.
TEST_P(GuessedSlotsTest, SamplesThatStopInADraft) {
  const GenerationRequest request = Request("r", Tokens(5, 9), 20);
  const Sinks whole = EachAlone({request});
  const auto script = ScriptOf({request}, whole);
  for (size_t stop = 1; stop < 12; ++stop) {
    SCOPED_TRACE(stop);
    GenerationRequest stopped = request;
    stopped.sampling.stop_token_ids = {whole[0]->samples[0].tokens[stop]};
    const Sinks expected = EachAlone({stopped});
    const std::vector<GenerationRequest> next = NextTurns({stopped}, expected);
    Sinks actual;
    ExpectSameTurns(Guessing(Roomy(), script, Mixed(0.7), 5), {stopped}, expected, next,
                    EachAlone(next), actual);
  }
}

struct NamedPath {
  const char* name;
  MakeHostOps make_ops;
};

TEST_P(GuessedSlotsTest, FastPath) {
  const std::vector<GenerationRequest> requests = Requests();
  const Sinks expected = EachAlone(requests);
  const std::vector<GenerationRequest> next = NextTurns(requests, expected);
  const Sinks expected_next = EachAlone(next);
  const std::vector<NamedPath> paths = {
      {"tree", [] { return MakeCpuBackend({.mode = NumericsMode::kTree}); }},
      {"vanilla", [] { return MakeCpuBackend({.mode = NumericsMode::kVanilla}); }},
      {"much noise", [] { return std::make_unique<NoisyOps>(0.5f); }}};
  for (const NamedPath& path : paths) {
    for (const auto& [window, together] : std::vector<std::pair<size_t, size_t>>{{2, 1}, {5, 3}}) {
      SCOPED_TRACE(testing::Message() << path.name << ", windows of " << window);
      EngineOptions options = Roomy();
      options.scheduler.max_running = 40;
      Sinks actual;
      ExpectSameTurns(FastPathOf(options, path.make_ops, window, together), requests, expected,
                      next, expected_next, actual);
      const int64_t candidates = SumOf(actual, &SampleEnd::num_draft_tokens);
      EXPECT_GT(candidates, 0);
      const bool all_right = SumOf(actual, &SampleEnd::num_accepted_tokens) == candidates;
      const std::string name = path.name;
      if (name != "vanilla") {
        EXPECT_EQ(all_right, name == "tree");
      }
    }
  }
}

// Beside them run others that take what the fast path draws. What these leave is found by nobody.
TEST_P(GuessedSlotsTest, TheFastPathBesideOthers) {
  const std::vector<GenerationRequest> requests = Requests();
  const Sinks expected = EachAlone(requests);
  std::vector<GenerationRequest> mixed;
  for (const GenerationRequest& request : requests) {
    mixed.push_back(request);
    mixed.back().id += ", any";
    mixed.back().deterministic = false;
    mixed.push_back(request);
  }
  const MakeHostOps noisy = [] { return std::make_unique<NoisyOps>(0.5f); };
  for (const int32_t pages : {20, 600}) {
    for (const int32_t slots : {0, 9}) {
      SCOPED_TRACE(testing::Message() << pages << " pages, " << slots << " slots");
      EngineOptions options = DefaultOptions();
      options.scheduler.max_running = 40;
      options.runner.num_pages = pages;
      options.runner.num_slots = slots;
      const auto engine = MakeEngine(FastPathOf(options, noisy, 5, 2));
      Sinks all = RunAll(*engine, mixed);
      Sinks required;
      for (size_t i = 1; i < all.size(); i += 2) required.push_back(all[i]);
      ExpectSame(required, expected);
      std::vector<GenerationRequest> next;
      for (size_t i = 0; i < all.size(); i += 2) {
        next.push_back(NextTurn(requests[i / 2], all[i]->samples[0]));
        next.back().sampling.max_tokens = 4;
      }
      if (slots == 0) ExpectSame(RunAll(*engine, next), EachAlone(next));
    }
  }
}

TEST_P(GuessedSlotsTest, NewWeightsAmongGuesses) {
  const GenerationRequest request = Request("r", Tokens(3, 10), 24);
  const Sinks v1 = EachAlone({request});
  const auto script = ScriptOf({request}, v1);
  for (const bool fast : {false, true}) {
    const auto engine =
        MakeEngine(fast ? FastPathOf(
                              Roomy(), [] { return std::make_unique<NoisyOps>(0.5f); }, 4, 1)
                        : Guessing(Roomy(), script, Mixed(0.8), 4));
    ExpectSame(RunAll(*engine, {request}), v1);
    ISOBIT_ASSERT_OK(Update(*engine, {.model_path = "v2"}));
    for (int time = 0; time < 2; ++time) {
      ExpectSame(RunAll(*engine, {request}), EachAlone({request}, "v2"));
    }
  }
}

}  // namespace
}  // namespace isobit
