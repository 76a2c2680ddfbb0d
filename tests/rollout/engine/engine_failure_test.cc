// A rank that fails ends the engine, and every request and reply gets the reason.
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "rollout/engine/engine.h"
#include "tests/rollout/engine/engine_fixture.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/forwarding_rank.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

using EngineFailureTest = EngineDepthFixture;
INSTANTIATE_TEST_SUITE_P(Depth, EngineFailureTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

// A backend that fails at its n-th linear layer.
class FailingOps final : public testing_support::ForwardingBackend {
 public:
  explicit FailingOps(std::atomic<int>& countdown)
      : ForwardingBackend(MakeCpuBackend({})), countdown_(countdown) {
    Replace<LinearArgs>(*this);
  }
  absl::Status On(const LinearArgs& args) {
    if (--countdown_ == 0) return absl::InternalError("device lost");
    return inner().Run(args);
  }

 private:
  std::atomic<int>& countdown_;
};

// Wraps a rank; its n-th call of one kind fails.
class FailingRank final : public testing_support::ForwardingRank {
 public:
  enum class Call { kLaunch, kCollect, kServe };
  FailingRank(std::unique_ptr<RankExecutor> rank, Call call, int countdown)
      : ForwardingRank(std::move(rank)), call_(call), countdown_(countdown) {}
  absl::Status Launch(const ModelStep& step) override {
    return Fails(Call::kLaunch) ? absl::InternalError("device lost") : ForwardingRank::Launch(step);
  }
  absl::Status Collect(ModelStep& step) override {
    return Fails(Call::kCollect) ? absl::InternalError("device lost")
                                 : ForwardingRank::Collect(step);
  }
  absl::Status Serve(const PreparedBlocks& prepared) override {
    return Fails(Call::kServe) ? absl::InternalError("device lost")
                               : ForwardingRank::Serve(prepared);
  }

 private:
  bool Fails(Call call) { return call == call_ && --countdown_ == 0; }

  const Call call_;
  int countdown_;
};

// Makes the ranks of `make_rank`, of which one fails at the end of the countdown.
MakeRank WithFailure(const MakeRank& make_rank, FailingRank::Call call, int countdown) {
  return [=](const RankOptions& rank) -> absl::StatusOr<std::unique_ptr<RankExecutor>> {
    auto made = make_rank(rank);
    if (!made.ok() || rank.comm.rank() != 2) return made;
    return std::make_unique<FailingRank>(*std::move(made), call, countdown);
  };
}

TEST_P(EngineFailureTest, ARankMayFailWithStepsInFlight) {
  for (const auto call : {FailingRank::Call::kLaunch, FailingRank::Call::kCollect}) {
    int num_failures = 0;
    EngineOptions options = DefaultOptions();
    options.runner.make_rank = WithFailure(options.runner.make_rank, call, 4);
    options.on_failure = [&](const absl::Status&) { ++num_failures; };
    const auto engine = MakeEngine(options);
    const auto sink = Submit(*engine, MakeRequest("r"));
    Steps(*engine, 2);
    const auto paused = Pause(*engine, PauseMode::kWait);
    Run(*engine);
    EXPECT_THAT(sink->done.value(),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("device lost")));
    EXPECT_THAT(paused->value(), StatusIs(absl::StatusCode::kUnavailable));
    EXPECT_EQ(num_failures, 1);
    EXPECT_EQ(engine->load().num_used_pages, 0);
  }
}

TEST_P(EngineFailureTest, ARankMayFailToSwitchWeights) {
  int num_failures = 0;
  EngineOptions options = DefaultOptions();
  options.runner.make_rank =
      WithFailure(options.runner.make_rank, FailingRank::Call::kServe, /*countdown=*/2);
  options.on_failure = [&](const absl::Status&) { ++num_failures; };
  const auto engine = MakeEngine(options);
  const auto sink = Submit(*engine, MakeRequest("r"));
  Steps(*engine, 2);
  Pause(*engine, PauseMode::kKeep);  // it must not finish while the weights are prepared
  EXPECT_THAT(Update(*engine, {.model_path = "v2", .mode = InFlightMode::kRecomputeKv}),
              StatusIs(absl::StatusCode::kInternal, "device lost"));
  EXPECT_THAT(sink->done.value(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("device lost")));
  EXPECT_EQ(num_failures, 1);
  EXPECT_EQ(engine->weight_version()->id, 1u);
  EXPECT_EQ(engine->load().num_used_pages, 0);
}

TEST_P(EngineFailureTest, ARankThatFailsEndsTheEngineNotTheProcess) {
  std::atomic<int> countdown{100};
  std::vector<absl::Status> failures;
  EngineOptions options = DefaultOptions();
  options.runner.make_rank = RankOf([&] { return std::make_unique<FailingOps>(countdown); });
  options.on_failure = [&](const absl::Status& status) { failures.push_back(status); };
  const auto engine = MakeEngine(options);
  const auto a = Submit(*engine, MakeRequest("a"));
  const auto b = Submit(*engine, MakeRequest("b"));
  engine->Step();
  const auto paused = Pause(*engine, PauseMode::kWait);
  Run(*engine);
  EXPECT_THAT(failures, testing::ElementsAre(StatusIs(absl::StatusCode::kInternal, "device lost")));
  for (const auto& sink : {a, b}) {
    EXPECT_THAT(sink->done.value(),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("device lost")));
    EXPECT_GE(sink->samples[0].tokens.size(), 1u) << "what was emitted stays";
  }
  engine->Step();
  EXPECT_THAT(paused->value(), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(engine->Submit(MakeRequest("c"), a), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(engine->load().num_used_pages, 0);
}

}  // namespace
}  // namespace isobit
