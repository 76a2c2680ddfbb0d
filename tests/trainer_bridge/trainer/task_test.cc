// The task `share`: prompts and rewards of a number.
#include "trainer_bridge/trainer/task.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace isobit::trainer {
namespace {

using testing::ElementsAre;
using testing_support::StatusIs;

// INVARIANT: these prompts on every machine, whatever was drawn before; a resumed run needs them.
TEST(TaskTest, SharesPromptsDependOnTheirNumber) {
  const auto task = MakeTask("share", 512);
  ISOBIT_ASSERT_OK(task);
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT((*task)->Prompt(0), ElementsAre(62, 395, 185, 238, 428, 494, 303, 232));
    EXPECT_THAT((*task)->Prompt(7), ElementsAre(423, 354, 462, 246, 221, 364, 385, 70));
  }
  const auto large = MakeTask("share", 49152);
  ISOBIT_ASSERT_OK(large);
  EXPECT_THAT((*large)->Prompt(3),
              ElementsAre(15275, 6631, 5587, 16021, 14213, 15716, 20567, 16104));
}

TEST(TaskTest, ShareCountsTheFirstQuarter) {
  const auto task = MakeTask("share", 10);  // tokens 0 and 1
  ISOBIT_ASSERT_OK(task);
  EXPECT_EQ((*task)->Reward(0, {0, 1, 2, 9, 1, 5, 5}), 3.0 / 7.0);
  EXPECT_EQ((*task)->Reward(0, {2}), 0.0);
}

TEST(TaskTest, RefusesAnUnknownName) {
  EXPECT_THAT(MakeTask("sharing", 10),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       testing::HasSubstr("--task: expected share, got sharing")));
}

}  // namespace
}  // namespace isobit::trainer
