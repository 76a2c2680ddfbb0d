// The task `share`: Python's prompts and rewards for the same numbers.
#include "trainer_bridge/trainer/task.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"
#include "trainer_bridge/trainer/python_random.h"

namespace isobit::trainer {
namespace {

using testing::ElementsAre;
using testing_support::StatusIs;

// INVARIANT: what Python 3.11's random.Random printed.
TEST(PythonRandomTest, DrawsPythonsNumbers) {
  PythonRandom x("x");
  int64_t sum = 0;
  std::vector<uint32_t> drawn;
  for (int i = 0; i < 2000; ++i) {  // more than one state's words
    drawn.push_back(x.Below(1000));
    sum += drawn.back();
  }
  EXPECT_EQ(sum, 1011366);
  EXPECT_THAT(std::vector(drawn.end() - 5, drawn.end()), ElementsAre(216, 243, 40, 76, 496));
  PythonRandom y("y");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(y.Below(1), 0);
  EXPECT_EQ(y.Below(1U << 31), 2091113820);
  EXPECT_EQ(y.Below(1U << 31), 2128884248);
  EXPECT_EQ(y.Below(1U << 31), 1549435682);
}

// INVARIANT: as tasks.py's Share printed.
TEST(TaskTest, SharesPromptsArePythons) {
  const auto task = MakeTask("share", 512);
  ISOBIT_ASSERT_OK(task);
  EXPECT_THAT((*task)->Prompt(0), ElementsAre(103, 98, 84, 316, 23, 262, 29, 220));
  EXPECT_THAT((*task)->Prompt(7), ElementsAre(410, 306, 219, 135, 250, 225, 178, 458));
  EXPECT_THAT((*task)->Prompt(123456789), ElementsAre(91, 212, 119, 246, 247, 115, 216, 141));
  const auto large = MakeTask("share", 49152);
  ISOBIT_ASSERT_OK(large);
  EXPECT_THAT((*large)->Prompt(3),
              ElementsAre(39604, 41849, 10751, 35429, 48387, 13979, 45225, 27478));
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
