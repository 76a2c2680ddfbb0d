// What the engine measures of its steps: the parts are there, each of them once, and only if asked
// for. On GPUs cuda_engine_test looks at the same.
#include "rollout/engine/step_times.h"

#include <chrono>
#include <memory>

#include "gtest/gtest.h"
#include "tests/rollout/engine/engine_fixture.h"

namespace isobit {
namespace {

class StepTimesTest : public EngineDepthFixture {
 protected:
  static double Device(const Engine& engine) {
    return engine.step_times().device_seconds(DevicePart::kForward) +
           engine.step_times().device_seconds(DevicePart::kDraw);
  }
  static double Thread(const Engine& engine) {
    double seconds = 0;
    for (size_t part = 0; part < kStepPartNames.size(); ++part) {
      seconds += engine.step_times().seconds(static_cast<StepPart>(part));
    }
    return seconds;
  }
};
INSTANTIATE_TEST_SUITE_P(Depth, StepTimesTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

// The device works while the engine's thread is in one of its parts, and no part counts twice.
TEST_P(StepTimesTest, PartsAddUpToLessThanTheTimeThatPassed) {
  const auto engine = MakeEngine();
  EXPECT_EQ(Device(*engine), 0) << "before the first step";
  const auto begin = std::chrono::steady_clock::now();
  const double thread_before = Thread(*engine);
  Generate(*engine, MakeRequest("r"));
  const double wall =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_GE(engine->step_times().num_steps(), 8);
  EXPECT_GT(engine->step_times().device_seconds(DevicePart::kForward), 0);
  EXPECT_GT(engine->step_times().device_seconds(DevicePart::kDraw), 0);
  EXPECT_LE(Device(*engine), Thread(*engine) - thread_before);
  EXPECT_LE(Thread(*engine) - thread_before, wall);
  EXPECT_GT(Device(*engine), 0.001 * wall) << "in seconds";
}

TEST_P(StepTimesTest, WithoutTimesStepsAreCountedAndBitsAreTheSame) {
  EngineOptions options = DefaultOptions();
  options.runner.time_steps = false;
  const auto untimed = MakeEngine(options);
  ExpectSameTokens(Generate(*untimed, MakeRequest("r")), Generate(*MakeEngine(), MakeRequest("r")));
  EXPECT_GE(untimed->step_times().num_steps(), 8);
  EXPECT_EQ(Device(*untimed), 0);
  EXPECT_EQ(Thread(*untimed), 0);
}

}  // namespace
}  // namespace isobit
