// Pauses and the drain, which take effect between steps.
#include <cmath>
#include <latch>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rollout/engine/engine.h"
#include "tests/rollout/engine/engine_fixture.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

using EngineControlTest = EngineDepthFixture;
INSTANTIATE_TEST_SUITE_P(Depth, EngineControlTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

TEST_P(EngineControlTest, PauseAbortEndsWhatIsInFlightAndHoldsWhatComes) {
  const auto engine = MakeEngine();
  const auto running = Submit(*engine, MakeRequest("running"));
  Steps(*engine, 2);
  const auto paused = Pause(*engine, PauseMode::kAbort);
  EXPECT_FALSE(paused->has_value()) << "not before the step is over";
  Run(*engine);
  EXPECT_EQ(paused->value()->num_aborted, 1u);
  EXPECT_EQ(running->samples[0].tokens.size(), 2 + in_flight());
  EXPECT_EQ(running->samples[0].end->reason, FinishReason::kAbort);
  EXPECT_TRUE(engine->load().paused);

  const auto queued = Submit(*engine, MakeRequest("queued"));
  EXPECT_FALSE(engine->Step());
  EXPECT_EQ(engine->load().num_waiting_requests, 1u);
  EXPECT_EQ(engine->Continue().value(), 1u);
  EXPECT_EQ(engine->Continue().value(), 1u) << "no error when nothing is paused";
  Run(*engine);
  EXPECT_EQ(queued->samples[0].end->reason, FinishReason::kLength);
}

TEST_P(EngineControlTest, PauseKeepGoesOnWhereItWas) {
  const auto engine = MakeEngine();
  const SampleResult expected = Generate(*engine, MakeRequest("r"));
  const auto sink = Submit(*engine, MakeRequest("r"));
  Steps(*engine, 3);
  const auto paused = Pause(*engine, PauseMode::kKeep);
  Run(*engine);
  EXPECT_EQ(paused->value()->num_kept, 1u);
  EXPECT_EQ(paused->value()->num_aborted, 0u);
  EXPECT_EQ(engine->load().num_used_pages, 2) << "pages and all";
  EXPECT_FALSE(engine->Step());
  EXPECT_EQ(sink->samples[0].tokens.size(), 3 + in_flight());

  const auto impossible = Pause(*engine, PauseMode::kWait);
  engine->Step();
  EXPECT_THAT(impossible->value(), StatusIs(absl::StatusCode::kFailedPrecondition));

  ISOBIT_EXPECT_OK(engine->Continue());
  Run(*engine);
  ExpectSameTokens(sink->samples[0], expected);
}

TEST_P(EngineControlTest, PauseWaitLetsWhatWasAcceptedFinish) {
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 1;
  const auto engine = MakeEngine(options);
  const auto running = Submit(*engine, MakeRequest("running"));
  const auto queued = Submit(*engine, MakeRequest("queued"));
  engine->Step();
  const auto paused = Pause(*engine, PauseMode::kWait);
  engine->Step();
  const auto late = Submit(*engine, MakeRequest("late"));
  Run(*engine);
  ASSERT_TRUE(paused->has_value());
  EXPECT_EQ(paused->value()->num_kept, 1u) << "the late one";
  EXPECT_EQ(running->samples[0].end->reason, FinishReason::kLength);
  EXPECT_EQ(queued->samples[0].end->reason, FinishReason::kLength);
  EXPECT_FALSE(late->done.has_value());
  const auto again = Pause(*engine, PauseMode::kWait);
  engine->Step();
  ISOBIT_EXPECT_OK(again->value()) << "only newcomers wait";
  ISOBIT_EXPECT_OK(engine->Continue());
  Run(*engine);
  EXPECT_EQ(late->samples[0].end->reason, FinishReason::kLength);
}

TEST_P(EngineControlTest, TheThreadEndsAWaitWithoutBeingAskedAgain) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 100;
  Submit(*engine, request);
  std::latch replied(1);
  engine->Pause(PauseMode::kWait, [&](const absl::StatusOr<PauseResult>& result) {
    ISOBIT_EXPECT_OK(result);
    replied.count_down();
  });
  engine->Start();
  replied.wait();
  EXPECT_EQ(engine->load().num_running_requests, 0u);
}

TEST_P(EngineControlTest, ContinueUndoesAPauseThatStillWaits) {
  const auto engine = MakeEngine();
  const auto sink = Submit(*engine, MakeRequest("r"));
  engine->Step();
  const auto paused = Pause(*engine, PauseMode::kWait);
  engine->Step();
  const auto late = Submit(*engine, MakeRequest("late"));
  ISOBIT_EXPECT_OK(engine->Continue());
  EXPECT_THAT(paused->value(), StatusIs(absl::StatusCode::kAborted));
  Run(*engine);
  ISOBIT_EXPECT_OK(late->done.value());
}

// A pause whose caller leaves before it takes effect.
struct LeavingCaller {
  bool gone = false;
  std::optional<absl::StatusOr<PauseResult>> result{};

  void Pause(Engine& engine, PauseMode mode) {
    engine.Pause(
        mode, [this](absl::StatusOr<PauseResult> r) { result = std::move(r); },
        [this] { return gone; });
  }
  void Leave(Engine& engine) {
    gone = true;
    engine.Wake();
  }
};

constexpr PauseMode kPauseModes[] = {PauseMode::kAbort, PauseMode::kWait, PauseMode::kKeep};

TEST_P(EngineControlTest, AnAbandonedPauseIsAsIfItHadNotBeenAskedFor) {
  for (const PauseMode mode : kPauseModes) {
    SCOPED_TRACE(static_cast<int>(mode));
    const auto engine = MakeEngine();
    const SampleResult expected = Generate(*engine, MakeRequest("r"));
    const auto running = Submit(*engine, MakeRequest("r"));
    Steps(*engine, 2);
    LeavingCaller caller;
    caller.Pause(*engine, mode);
    if (mode == PauseMode::kWait) engine->Step();  // the others would take effect
    const auto late = Submit(*engine, MakeRequest("late"));
    caller.Leave(*engine);
    Run(*engine);
    EXPECT_THAT(caller.result.value(), StatusIs(absl::StatusCode::kCancelled, HasSubstr("pause")));
    EXPECT_FALSE(engine->load().paused);
    ExpectSameTokens(running->samples[0], expected);
    ASSERT_TRUE(late->done.has_value()) << "held";
    EXPECT_EQ(late->samples[0].end->reason, FinishReason::kLength);
  }
}

TEST_P(EngineControlTest, AnAbandonedPauseLeavesTheOthersPause) {
  const auto engine = MakeEngine();
  Submit(*engine, MakeRequest("r"));
  LeavingCaller leaves;
  LeavingCaller stays;
  leaves.Pause(*engine, PauseMode::kWait);
  stays.Pause(*engine, PauseMode::kWait);
  engine->Step();
  leaves.Leave(*engine);
  Run(*engine);
  EXPECT_THAT(leaves.result.value(), StatusIs(absl::StatusCode::kCancelled));
  ISOBIT_EXPECT_OK(stays.result.value());
  EXPECT_TRUE(engine->load().paused);
  stays.Leave(*engine);
  engine->Step();
  EXPECT_TRUE(engine->load().paused) << "it has taken effect";
}

TEST_P(EngineControlTest, DrainRefusesNewRequestsAndFinishesTheOld) {
  const auto engine = MakeEngine();
  const auto sink = Submit(*engine, MakeRequest("r"));
  engine->Step();
  engine->BeginDrain();
  EXPECT_THAT(engine->Submit(MakeRequest("late"), sink),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("draining")));
  EXPECT_THAT(Update(*engine, {.model_path = "v2"}), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(Pause(*engine, PauseMode::kKeep)->value(), StatusIs(absl::StatusCode::kUnavailable));
  Run(*engine);
  EXPECT_EQ(sink->samples[0].end->reason, FinishReason::kLength);
}

TEST_P(EngineControlTest, DrainEndsPausedRequests) {
  const auto engine = MakeEngine();
  const auto sink = Submit(*engine, MakeRequest("r"));
  engine->Step();
  Pause(*engine, PauseMode::kKeep);
  engine->Step();
  engine->BeginDrain();
  engine->Step();
  ISOBIT_ASSERT_OK(sink->done.value());
  EXPECT_EQ(sink->samples[0].end->reason, FinishReason::kAbort);
}

// A sink that only counts, and knows when it is done.
class CountingSink final : public RequestSink {
 public:
  void OnToken(uint32_t, SampledToken token) override {
    EXPECT_TRUE(std::isfinite(token.logprob));
    EXPECT_GE(token.weight_version, last_version_);
    last_version_ = token.weight_version;
  }
  void OnSampleEnd(uint32_t, SampleEnd) override { ++num_ends_; }
  void OnDone(const absl::Status& status) override {
    ISOBIT_EXPECT_OK(status);
    EXPECT_EQ(num_ends_, 2);
    done_.count_down();
  }
  void AwaitDone() { done_.wait(); }

 private:
  uint64_t last_version_ = 0;
  int num_ends_ = 0;
  std::latch done_{1};
};

// Calls from many threads, for the sanitizers to check.
TEST_P(EngineControlTest, SurvivesCallsFromManyThreads) {
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 20;  // some requests are preempted
  const auto engine = MakeEngine(options);
  engine->Start();
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        GenerationRequest request = MakeRequest(absl::StrCat(t, "-", i));
        request.sampling.n = 2;
        request.sampling.max_tokens = static_cast<uint32_t>(10 + i);
        const auto sink = std::make_shared<CountingSink>();
        const auto ticket = engine->Submit(request, sink);
        ISOBIT_ASSERT_OK(ticket);
        if (i % 4 == 1) engine->Cancel(*ticket, "gone");
        if (i % 4 == 2) engine->Abort({request.id});
        sink->AwaitDone();
      }
    });
  }
  threads.emplace_back([&] {
    for (const PauseMode mode : {PauseMode::kKeep, PauseMode::kAbort, PauseMode::kWait}) {
      std::latch replied(1);
      engine->Pause(mode, [&](const absl::StatusOr<PauseResult>&) { replied.count_down(); });
      replied.wait();
      EXPECT_TRUE(engine->load().paused);
      ISOBIT_EXPECT_OK(engine->Continue());
    }
  });
  threads.emplace_back([&] {
    for (const InFlightMode mode :
         {InFlightMode::kRecomputeKv, InFlightMode::kAbort, InFlightMode::kRecomputeKv}) {
      std::latch replied(1);
      engine->UpdateWeights({.model_path = "v2", .mode = mode},
                            [&](const absl::StatusOr<WeightUpdateResult>& result) {
                              ISOBIT_EXPECT_OK(result);
                              replied.count_down();
                            });
      replied.wait();
    }
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(engine->weight_version()->id, 4u);
  EXPECT_EQ(engine->load().num_used_pages, 0);
  EXPECT_EQ(engine->load().num_waiting_tokens, 0);
}

}  // namespace
}  // namespace isobit
