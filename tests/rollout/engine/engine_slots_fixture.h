// Engines over a model one of whose blocks keeps its state in slots, requests that need them, and
// what these give alone.
#ifndef ISOBIT_TESTS_ROLLOUT_ENGINE_ENGINE_SLOTS_FIXTURE_H_
#define ISOBIT_TESTS_ROLLOUT_ENGINE_ENGINE_SLOTS_FIXTURE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "rollout/engine/engine.h"
#include "tests/rollout/engine/engine_fixture.h"
#include "tests/support/running_sum.h"
#include "tests/support/status_matchers.h"

namespace isobit {

// StateSpec::slot_rows of the block, and the depth of the ranks.
using RowsAndDepth = std::tuple<int32_t, int>;

// One pair under the thread sanitizer, which takes minutes for all: threads are the same in each.
inline auto AllRowsAndDepths() {
#ifdef __SANITIZE_THREAD__
  return testing::Combine(testing::Values(4), testing::Values(2));
#else
  return testing::Combine(testing::Values(1, 4), testing::Values(1, 2));
#endif
}

inline std::string RowsAndDepthName(const testing::TestParamInfo<RowsAndDepth>& info) {
  return absl::StrCat("Rows", std::get<0>(info.param), "Depth", std::get<1>(info.param));
}

class EngineSlotsFixture : public EngineFixture, public testing::WithParamInterface<RowsAndDepth> {
 protected:
  // The sinks of requests, in order.
  using Sinks = std::vector<std::shared_ptr<RecordingSink>>;

  EngineSlotsFixture() { depth_ = std::get<1>(GetParam()); }

  ModelPlan Plan() const {
    return testing_support::PlanWithRunningSums(config_, std::get<0>(GetParam()));
  }

  // Hides the fixture's, whose model has no slots.
  std::unique_ptr<Engine> MakeEngine(const EngineOptions& options,
                                     const std::string& model = "v1") const {
    absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(Plan(), options);
    ISOBIT_EXPECT_OK(engine);
    ISOBIT_EXPECT_OK(Update(**engine, {.model_path = model}));
    return *std::move(engine);
  }

  // Room for all that the tests below ask at once.
  EngineOptions Roomy() const {
    EngineOptions options = DefaultOptions();
    options.runner.num_pages = 300;
    return options;
  }

  // Some tokens, none of which ends a sequence.
  static std::vector<int32_t> Tokens(uint32_t seed, size_t count) {
    std::vector<int32_t> tokens;
    for (uint32_t state = seed * 7919 + 1; tokens.size() < count;) {
      state = state * 1664525u + 1013904223u;
      tokens.push_back(static_cast<int32_t>(2 + (state >> 16) % 99));
    }
    return tokens;
  }

  static GenerationRequest Request(const std::string& id, std::vector<int32_t> prompt,
                                   uint32_t max_tokens = 12, uint32_t n = 1) {
    GenerationRequest request = MakeRequest(id, 11 + prompt.size());
    request.prompt = std::move(prompt);
    request.sampling.max_tokens = max_tokens;
    request.sampling.n = n;
    return request;
  }

  // Prompts that fill pages and that do not, the shortest of one token.
  static std::vector<GenerationRequest> Strangers(size_t count, uint32_t max_tokens = 12) {
    constexpr size_t kLengths[] = {5, 16, 1, 19, 4, 8, 13, 3};
    std::vector<GenerationRequest> requests;
    for (size_t i = 0; i < count; ++i) {
      requests.push_back(Request(absl::StrCat("stranger ", i),
                                 Tokens(static_cast<uint32_t>(i), kLengths[i % 8]), max_tokens));
    }
    return requests;
  }

  // Submits all, steps until all have ended. between: called before each step, which it counts.
  static Sinks RunAll(Engine& engine, const std::vector<GenerationRequest>& requests,
                      const std::function<void(int step)>& between = nullptr) {
    Sinks sinks;
    for (const GenerationRequest& request : requests) sinks.push_back(Submit(engine, request));
    int step = 0;
    do {
      if (between) between(step++);
    } while (engine.Step());
    EXPECT_EQ(engine.load().num_used_pages, 0);
    return sinks;
  }

  // Each request alone on a new engine of one rank, where nothing is shared or guessed.
  Sinks EachAlone(const std::vector<GenerationRequest>& requests,
                  const std::string& model = "v1") const {
    EngineOptions options = Roomy();
    options.runner.tensor_parallel_size = 1;
    options.scheduler.share_prefixes = false;
    Sinks sinks;
    for (const GenerationRequest& request : requests) {
      sinks.push_back(RunAll(*MakeEngine(options, model), {request}).front());
    }
    return sinks;
  }

  static void ExpectSame(const Sinks& actual, const Sinks& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t r = 0; r < expected.size(); ++r) {
      ASSERT_EQ(actual[r]->done, absl::OkStatus()) << "request " << r;
      ASSERT_EQ(actual[r]->samples.size(), expected[r]->samples.size());
      for (const auto& [index, sample] : expected[r]->samples) {
        SCOPED_TRACE(testing::Message() << "request " << r << ", sample " << index);
        const SampleResult& result = actual[r]->samples.at(index);
        EXPECT_FALSE(result.tokens.empty());
        ExpectSameTokens(result, sample);
        ASSERT_TRUE(result.end.has_value());
        EXPECT_EQ(result.end->reason, sample.end->reason);
      }
    }
  }

  // The sum of a count over all samples.
  static int64_t SumOf(const Sinks& sinks, uint32_t SampleEnd::*count) {
    int64_t sum = 0;
    for (const auto& sink : sinks) {
      for (const auto& [index, sample] : sink->samples) {
        if (sample.end) sum += (*sample.end).*count;
      }
    }
    return sum;
  }

  // The request that goes on with what another has drawn, and two more tokens.
  static GenerationRequest NextTurn(const GenerationRequest& request, const SampleResult& said) {
    GenerationRequest next = request;
    next.id += ", next turn";
    next.sampling.n = 1;
    next.prompt.insert(next.prompt.end(), said.tokens.begin(), said.tokens.end());
    next.prompt.insert(next.prompt.end(), {7, 8});
    return next;
  }
};

}  // namespace isobit

#endif  // ISOBIT_TESTS_ROLLOUT_ENGINE_ENGINE_SLOTS_FIXTURE_H_
