// Pauses, drains and failure in the ControlGate alone; the test gives the number of steps in
// flight.
#include "rollout/engine/control_gate.h"

#include <memory>
#include <optional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rollout/engine/request_table_fixture.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

class ControlGateTest : public RequestTableFixture {
 protected:
  using Result = std::optional<absl::StatusOr<PauseResult>>;

  std::shared_ptr<Result> Pause(PauseMode mode, IsAbandoned is_abandoned = nullptr) {
    auto result = std::make_shared<Result>();
    gate_.Pause({mode, [result](absl::StatusOr<PauseResult> r) { *result = std::move(r); },
                 std::move(is_abandoned)});
    return result;
  }

  void Settle(size_t num_in_flight) {
    gate_.Settle(num_in_flight, table_, outbox_);
    Deliver();
  }

  ControlGate gate_;
};

TEST_F(ControlGateTest, APauseHoldsLaunchesUntilNothingIsInFlight) {
  Add("a");
  const auto pause = Pause(PauseMode::kKeep);
  EXPECT_TRUE(gate_.has_waiting_pauses());
  EXPECT_TRUE(gate_.MayLaunch());
  Settle(1);
  EXPECT_FALSE(*pause);
  EXPECT_FALSE(gate_.MayLaunch());
  EXPECT_FALSE(gate_.is_paused());
  Settle(0);
  ISOBIT_ASSERT_OK(**pause);
  EXPECT_EQ((**pause)->num_kept, 1u);
  EXPECT_TRUE(gate_.is_paused());
  EXPECT_FALSE(gate_.MayLaunch());
  EXPECT_FALSE(gate_.has_waiting_pauses());

  EXPECT_TRUE(gate_.Continue().empty());
  EXPECT_TRUE(gate_.MayLaunch());
}

TEST_F(ControlGateTest, AnAbortingPauseEndsWhatThereIs) {
  const auto sink = Add("a");
  const auto pause = Pause(PauseMode::kAbort);
  Settle(0);
  EXPECT_EQ((**pause)->num_aborted, 1u);
  EXPECT_EQ((**pause)->num_kept, 0u);
  EXPECT_EQ(sink->samples[0].end->abort_reason, "generation was paused");
}

TEST_F(ControlGateTest, AWaitingPauseLetsWhatWasAcceptedRun) {
  Add("a");
  const auto pause = Pause(PauseMode::kWait);
  Settle(0);
  EXPECT_FALSE(*pause);
  EXPECT_TRUE(gate_.MayLaunch());
  Add("late");
  EXPECT_EQ(table_.scheduler().Schedule().sequences.size(), 1u);  // not the newcomer
  table_.AbortAll("done");
  Settle(0);
  ISOBIT_EXPECT_OK(**pause);
}

TEST_F(ControlGateTest, AWaitingPauseFailsWhilePausedWithRequestsKept) {
  Add("a");
  Pause(PauseMode::kKeep);
  const auto pause = Pause(PauseMode::kWait);
  Settle(0);
  EXPECT_THAT(**pause, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("1 requests")));
}

TEST_F(ControlGateTest, ContinueReturnsThePausesThatWait) {
  Pause(PauseMode::kKeep);
  Settle(1);
  EXPECT_EQ(gate_.Continue().size(), 1u);
  Settle(0);
  EXPECT_FALSE(gate_.is_paused());
}

TEST_F(ControlGateTest, AnAbandonedPauseTakesNoEffect) {
  const auto pause = Pause(PauseMode::kAbort, [] { return true; });
  const auto sink = Add("a");
  Settle(0);
  EXPECT_THAT(**pause, StatusIs(absl::StatusCode::kCancelled));
  EXPECT_FALSE(sink->done);
  EXPECT_FALSE(gate_.is_paused());
}

TEST_F(ControlGateTest, QuietIsAskedForAgainAtEachSettle) {
  EXPECT_TRUE(gate_.IsQuiet(0));
  EXPECT_TRUE(gate_.MayLaunch());
  EXPECT_FALSE(gate_.IsQuiet(2));
  EXPECT_FALSE(gate_.MayLaunch());
  Settle(0);
  EXPECT_TRUE(gate_.MayLaunch());
}

TEST_F(ControlGateTest, ADrainEndsPausedRequests) {
  const auto sink = Add("a");
  gate_.Drain();
  EXPECT_THAT(gate_.Available(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("draining")));
  Settle(0);
  EXPECT_FALSE(sink->done);
  Pause(PauseMode::kKeep);
  Settle(0);
  EXPECT_EQ(sink->done, absl::OkStatus());
}

TEST_F(ControlGateTest, AFailureAnswersThePausesThatWait) {
  const auto pause = Pause(PauseMode::kKeep);
  gate_.Fail(absl::InternalError("device lost"));
  Settle(1);
  EXPECT_THAT(**pause, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("device lost")));
  EXPECT_THAT(gate_.Available(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("failed")));
}

TEST_F(ControlGateTest, NewcomersWaitWhileSomethingDoes) {
  Scheduler& scheduler = table_.scheduler();
  const auto newcomer_waits = [&](bool update_waits) {
    gate_.HoldNewcomers(update_waits, scheduler);
    Add(std::to_string(last_ticket_));
    const bool waits = scheduler.Schedule().sequences.empty();
    table_.AbortAll("done");
    return waits;
  };
  EXPECT_FALSE(newcomer_waits(false));
  EXPECT_TRUE(newcomer_waits(true));
  EXPECT_FALSE(newcomer_waits(false));
  Pause(PauseMode::kKeep);
  EXPECT_TRUE(newcomer_waits(false));
  Settle(0);
  EXPECT_TRUE(newcomer_waits(false));
  gate_.Continue();
  EXPECT_FALSE(newcomer_waits(false));
}

}  // namespace
}  // namespace isobit
