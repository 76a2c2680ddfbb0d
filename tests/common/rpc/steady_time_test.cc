// Deadlines by the steady clock: a step of the wall clock moves none of them.
#include "common/rpc/steady_time.h"

#include <grpcpp/client_context.h>

#include <chrono>

#include "gtest/gtest.h"
#include "tests/support/wall_clock.h"

namespace isobit {
namespace {

using std::chrono::hours;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing_support::SetWallClockAhead;

double SecondsLeft(gpr_timespec time) {
  const gpr_timespec left =
      gpr_time_sub(gpr_convert_clock_type(time, GPR_CLOCK_MONOTONIC), gpr_now(GPR_CLOCK_MONOTONIC));
  return static_cast<double>(left.tv_sec) + 1e-9 * left.tv_nsec;
}

TEST(SteadyTimeTest, AStepOfTheWallClockMovesNoDeadline) {
  const auto wall_before = std::chrono::system_clock::now();
  const SteadyTime in_a_minute = steady_clock::now() + seconds(60);
  grpc::ClientContext steady, wall;
  steady.set_deadline(in_a_minute);
  wall.set_deadline(wall_before + seconds(60));
  SetWallClockAhead(hours(2));
  EXPECT_GT(std::chrono::system_clock::now() - wall_before, hours(1)) << "the clock is stepped";
  EXPECT_NEAR(SecondsLeft(steady.raw_deadline()), 60, 30);
  EXPECT_NEAR(SecondsLeft(ToGprTime(in_a_minute)), 60, 30) << "converted after the step";
  EXPECT_LT(SecondsLeft(wall.raw_deadline()), 0) << "the control: it has passed";
  SetWallClockAhead(seconds(0));
}

TEST(SteadyTimeTest, FarIsNever) {
  EXPECT_EQ(gpr_time_cmp(ToGprTime(SteadyTime::max()), gpr_inf_future(GPR_CLOCK_MONOTONIC)), 0);
  EXPECT_LT(SecondsLeft(ToGprTime(steady_clock::now() - seconds(5))), 0);
}

}  // namespace
}  // namespace isobit
