// With a fast path, requests that must be deterministic have the bits that they have without one,
// however far the fast path is from the contract, and whoever runs beside them.
#include "rollout/guesses/fast_path/fast_path.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/rollout/guesses/noisy_ops.h"
#include "tests/rollout/guesses/speculation_fixture.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

struct NamedPath {
  const char* name;
  MakeHostOps make_ops;
};
NamedPath OfMode(const char* name, NumericsMode mode) {
  return {name, [mode] { return MakeCpuBackend({.mode = mode}); }};
}
NamedPath Noisy(const char* name, float noise) {
  return {name, [noise] { return std::make_unique<NoisyOps>(noise); }};
}
NamedPath Tree() { return OfMode("tree", NumericsMode::kTree); }
NamedPath NoiseAlone() { return Noisy("noise alone", 1000.0f); }
std::vector<NamedPath> FastPaths() {
#ifdef ISOBIT_SANITIZED
  return {OfMode("vanilla", NumericsMode::kVanilla), Noisy("much noise", 0.5f)};
#else
  return {Tree(), OfMode("vanilla", NumericsMode::kVanilla), Noisy("a little noise", 0.02f),
          Noisy("much noise", 0.5f), NoiseAlone()};
#endif
}

class FastPathTest : public SpeculationFixture {
 protected:
  EngineOptions With(EngineOptions options, const NamedPath& path, size_t window,
                     size_t group) const {
    options.runner.make_rank = RankOf([] { return MakeCpuBackend({}); }, path.make_ops);
    // A group may exceed what a step has room for.
    options.make_guesser = [=](size_t /*max_running*/) -> absl::StatusOr<std::unique_ptr<Guesser>> {
      return std::make_unique<FastPath>(FastPathOptions{.window = window, .group = group});
    };
    return options;
  }

  // Runs the requests together with others that need not be deterministic, and compares theirs.
  void CompareMixed(const Results& expected, const EngineOptions& options,
                    const std::vector<GenerationRequest>& requests, Comparison& sum,
                    const Disturb& disturb = nullptr) const {
    std::vector<GenerationRequest> mixed;
    for (const GenerationRequest& request : requests) {
      mixed.push_back(request);
      mixed.push_back(request);
      mixed.back().id += ", any";
      mixed.back().deterministic = false;
    }
    const Results all = RunAll(options, mixed, disturb);
    Results required;
    for (size_t i = 0; i < all.size(); i += 2) {
      required.push_back(all[i]);
      for (const auto& [sample, result] : all[i + 1]->samples) {
        EXPECT_EQ(result.end->num_draft_tokens, 0u) << "verified without need";
      }
    }
    Compare(expected, required, sum);
  }

  void Print(const char* what, const Comparison& c) const {
    std::printf(
        "%s, depth %d: %ld tokens compared, %ld differ, %ld other ends; %ld of %ld "
        "candidates became tokens\n",
        what, depth_, c.tokens, c.different, c.other_ends, c.accepted, c.draft_tokens);
  }

  static const FastPathCounts& CountsOf(const Engine& engine) {
    return static_cast<const FastPath&>(*engine.guesser()).counts();
  }

  // What a path's candidates are worth.
  static void ExpectAcceptance(const NamedPath& path, const Comparison& c) {
    const std::string name = path.name;
    EXPECT_GT(c.draft_tokens, 0);
    if (name == "tree") {
      EXPECT_EQ(c.accepted, c.draft_tokens);
    } else if (name == "a little noise" || name == "much noise") {
      EXPECT_GT(c.accepted, 0);
      EXPECT_LT(c.accepted, c.draft_tokens);
    } else if (name == "noise alone") {
      EXPECT_LT(c.accepted, c.draft_tokens / 10);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Depth, FastPathTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

#ifdef ISOBIT_SANITIZED
const std::vector<std::pair<size_t, size_t>> kGroupsOfWindows = {{5, 3}};
const std::vector<int32_t> kPages = {14};
#else
const std::vector<int32_t> kPages = {14, 300};
// Rows of a window, and windows of a group.
const std::vector<std::pair<size_t, size_t>> kGroupsOfWindows = {{2, 1}, {3, 8}, {5, 3}, {16, 4}};
#endif

// INVARIANT: any fast path, window and group, at any parallel size, over all sampling parameters.
TEST_P(FastPathTest, DeterministicRequestsHaveTheirBits) {
  const std::vector<GenerationRequest> requests = AllParameters(1);
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 40;
  options.runner.num_pages = 300;
  const Results expected = RunAll(options, requests);
  for (const NamedPath& path : FastPaths()) {
    SCOPED_TRACE(path.name);
    Comparison all;
    for (const int tp_size : {1, 2, 4}) {
      options.runner.tensor_parallel_size = tp_size;
      for (const auto& [window, group] : kGroupsOfWindows) {
        CompareMixed(expected, With(options, path, window, group), requests, all);
      }
    }
    EXPECT_TRUE(all.same());
    ExpectAcceptance(path, all);
    Print(path.name, all);
  }
}

// INVARIANT: groups of samples that share their prompt, few pages, small budgets of draws and rows.
TEST_P(FastPathTest, SharedPromptsPreemptionAndSmallBudgets) {
  std::vector<GenerationRequest> requests = AllParameters(2, 24);
  for (GenerationRequest& request : requests) {
    request.prompt = {3, 14, 15, 92, 65, 35, 89, 79, 32, 38};
  }
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 40;
  const Results expected = RunAll(options, requests);
  int64_t preemptions = 0;
  for (const NamedPath& path : FastPaths()) {
    SCOPED_TRACE(path.name);
    Comparison all;
    for (const int32_t pages : kPages) {
      for (const bool share : {false, true}) {
        for (const size_t running : {6u, 40u}) {
          options.runner.num_pages = pages;
          options.scheduler = {
              .max_running = running, .max_batch_tokens = 40, .share_prefixes = share};
          CompareMixed(expected, With(options, path, 6, 3), requests, all,
                       [&](Engine& engine, int) {
                         preemptions = std::max(preemptions, engine.load().num_preemptions);
                       });
        }
      }
    }
    EXPECT_TRUE(all.same());
    EXPECT_GT(all.draft_tokens, 0);
    Print(path.name, all);
  }
  EXPECT_GT(preemptions, 10);
}

// INVARIANT: what the fast path has computed is never found by others: turns of a conversation
// whose earlier turn was deterministic or not.
TEST_P(FastPathTest, ConversationsFindExactPages) {
  for (const NamedPath& path : FastPaths()) {
    SCOPED_TRACE(path.name);
    Comparison all;
    for (const bool deterministic : {true, false}) {
      for (const uint32_t length : {5u, 8u, 13u, 26u}) {
        GenerationRequest first = MakeRequest("first");
        first.sampling.max_tokens = length;
        first.deterministic = deterministic;
        const auto engine = MakeEngine(With(DefaultOptions(), path, 5, 2));
        const SampleResult said = Generate(*engine, first);
        GenerationRequest next = MakeRequest("next");
        next.prompt.insert(next.prompt.end(), said.tokens.begin(), said.tokens.end());
        next.prompt.insert(next.prompt.end(), {7, 8});
        const auto found = Submit(*engine, next);
        Run(*engine);
        Compare(RunAll(DefaultOptions(), {next}), {found}, all);
        const uint32_t cached = found->samples[0].end->num_cached_prompt_tokens;
        EXPECT_EQ(cached, deterministic ? (4 + length) / 4 * 4 : 4);
      }
    }
    EXPECT_TRUE(all.same());
  }
}

TEST_P(FastPathTest, PausesAndUpdates) {
  const std::vector<GenerationRequest> requests = AllParameters(1, 24);
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 40;
  options.runner.num_pages = 300;
  const Results of_old = RunAll(options, requests);
  for (const NamedPath& path : FastPaths()) {
    SCOPED_TRACE(path.name);
    const EngineOptions with = With(options, path, 6, 3);
    Comparison all;
    CompareMixed(of_old, with, requests, all, [&](Engine& engine, int step) {
      if (step % 3 == 1) {
        Pause(engine, PauseMode::kKeep);
      } else if (step % 3 == 2) {
        ISOBIT_EXPECT_OK(engine.Continue());
      }
    });
    // An update that keeps requests computes their tokens again with the new weights. What comes
    // after them is what the new weights give behind these tokens.
    GenerationRequest request = MakeRequest("r");
    request.sampling.max_tokens = 30;
    const auto engine = MakeEngine(with);
    const auto sink = Submit(*engine, request);
    while (sink->samples[0].tokens.size() < 8 && engine->Step()) {
    }
    for (int i = 0; i < 3; ++i) engine->Step();  // candidates
    Pause(*engine, PauseMode::kKeep);
    ISOBIT_EXPECT_OK(Update(*engine, {.model_path = "v2", .mode = InFlightMode::kRecomputeKv}));
    ISOBIT_EXPECT_OK(engine->Continue());
    Run(*engine);
    const SampleResult& actual = sink->samples[0];
    const auto old = std::ranges::count(actual.versions, actual.versions.front());
    EXPECT_GE(old, 8);
    EXPECT_LT(old, 30);
    GenerationRequest rest = request;
    rest.prompt.insert(rest.prompt.end(), actual.tokens.begin(), actual.tokens.begin() + old);
    rest.sampling.max_tokens -= static_cast<uint32_t>(old);
    const SampleResult after = Generate(*MakeEngine(options, "v2"), rest);
    EXPECT_TRUE(std::equal(actual.tokens.begin() + old, actual.tokens.end(), after.tokens.begin(),
                           after.tokens.end()));
    EXPECT_TRUE(all.same());
    Print(path.name, all);
  }
}

// Four requests, 13 tokens each: the prompt's step draws one, and each of three steps verifies a
// window of every request, which gives it four.
TEST_P(FastPathTest, WindowsAreVerifiedTogether) {
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(MakeRequest(std::to_string(i), 11 + static_cast<uint64_t>(i)));
    requests.back().sampling.max_tokens = 13;
  }
  const auto engine = MakeEngine(With(DefaultOptions(), Tree(), 4, 4));
  for (const GenerationRequest& request : requests) Submit(*engine, request);
  Run(*engine);
  const FastPathCounts& counts = CountsOf(*engine);
  EXPECT_EQ(counts.steps, 3 * 3);
  EXPECT_EQ(engine->step_times().num_steps() - counts.steps, 1 + 3);
  EXPECT_EQ(counts.drafts, 4 * 3);
  EXPECT_EQ(counts.accepted_tokens, 4 * 3 * 3);
  EXPECT_EQ(counts.rollbacks, 0);
  EXPECT_EQ(counts.recomputed, 0);
}

TEST_P(FastPathTest, WrongCandidatesAreCountedAndRolledBack) {
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 40;
  const auto engine = MakeEngine(With(DefaultOptions(), NoiseAlone(), 8, 1));
  const SampleResult actual = Generate(*engine, request);
  ExpectSameTokens(actual, Generate(*MakeEngine(), request));
  const FastPathCounts& counts = CountsOf(*engine);
  EXPECT_GT(counts.drafts, 20);
  EXPECT_GT(counts.rollbacks, counts.drafts / 2);
  EXPECT_EQ(counts.accepted_tokens + counts.recomputed, actual.end->num_draft_tokens);
  EXPECT_EQ(counts.accepted_tokens, actual.end->num_accepted_tokens);
}

// A request that need not be deterministic takes what the fast path draws: without noise the tokens
// of others, with noise other tokens, and never a window.
TEST_P(FastPathTest, TheFastPathServesThoseWhoWantNoMore) {
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 30;
  request.deterministic = false;
  const SampleResult exact = Generate(*MakeEngine(), request);
  const auto same = MakeEngine(With(DefaultOptions(), Tree(), 8, 1));
  ExpectSameTokens(Generate(*same, request), exact);
  const auto noisy = MakeEngine(With(DefaultOptions(), NoiseAlone(), 8, 1));
  EXPECT_NE(Generate(*noisy, request).tokens, exact.tokens);
  for (const auto* engine : {same.get(), noisy.get()}) {
    EXPECT_EQ(CountsOf(*engine).drafts, 0);
    EXPECT_EQ(CountsOf(*engine).steps, 29);
  }
}

TEST_P(FastPathTest, ABackendWithoutOneIsRefused) {
  EngineOptions options = DefaultOptions();
  options.make_guesser = FastPath::Maker({.window = 4, .group = 2});
  EXPECT_EQ(Engine::Create(config_, options).status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace isobit
