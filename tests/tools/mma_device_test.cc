// isobit-numerics on GPUs: Hopper computes the contract, by both instructions. Skips with a message
// if there is no device.
#include "tools/mma_device.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/tools/run_tool.h"

namespace isobit {
namespace {

using testing::HasSubstr;

TEST(MmaDeviceTest, WithoutADeviceTheToolSaysSo) {
  const auto outcome = testing_support::RunTool("CUDA_VISIBLE_DEVICES= " ISOBIT_NUMERICS, "");
  EXPECT_EQ(outcome.exit_code, 3) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("isobit-numerics: "));
}

TEST(MmaDeviceTest, HopperComputesTheContract) {
  const auto cards = ListCards();
  if (!cards.ok() || cards->empty() || !cards->front().is_hopper()) {
    GTEST_SKIP() << "no Hopper GPU on this machine";
  }
  const MmaSteps steps = MakeMmaSteps(1000000, 2);
  const std::vector<float> expected = ContractResults(steps);
  const auto mma_sync = RunMmaSync(cards->front(), steps);
  ASSERT_TRUE(mma_sync.ok()) << mma_sync.status();
  EXPECT_EQ(CompareMmaSteps(steps, expected, *mma_sync).different, 0);
  const auto wgmma = RunWgmma(cards->front(), steps);
  ASSERT_TRUE(wgmma.ok()) << wgmma.status();
  EXPECT_EQ(CompareMmaSteps(steps, expected, *wgmma).different, 0);

  const auto outcome = testing_support::RunTool(ISOBIT_NUMERICS, "--json");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("\"computes_contract\": true"));
}

// The control: the card is asked for other steps than those that the contract computes.
TEST(MmaDeviceTest, OtherInputsDiffer) {
  const auto cards = ListCards();
  if (!cards.ok() || cards->empty() || !cards->front().is_hopper()) {
    GTEST_SKIP() << "no Hopper GPU on this machine";
  }
  const MmaSteps steps = MakeMmaSteps(1, 2);
  MmaSteps flipped = steps;
  for (contract::Bf16& operand : flipped.a) operand ^= 0x8000u;
  const std::vector<float> expected = ContractResults(steps);
  const auto got = RunWgmma(cards->front(), flipped);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_GT(CompareMmaSteps(steps, expected, *got).different, steps.steps() / 4);
}

}  // namespace
}  // namespace isobit
