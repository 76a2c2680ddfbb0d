// The CPU backend against the golden bits (golden.h).
#include "tests/invariance/golden.h"

#include <filesystem>
#include <string>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_ops.h"
#include "tests/invariance/forward_harness.h"
#include "tests/support/test_name.h"

namespace isobit::invariance {
namespace {

class GoldenTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenTest, DigestsHold) {
  const std::string directory = GoldenModelDirectory(GetParam());
  if (!std::filesystem::exists(directory + "/config.json")) {
    GTEST_SKIP() << directory << " is not there: python -m isobit.smollm2 makes it";
  }
  const ForwardHarness model(directory);
  const Tokens tokens = GoldenTokens(GetParam(), model);
  Schedule schedule;
  schedule.make_ops = [] { return MakeCpuOps({.num_threads = 2}); };
  const nlohmann::json actual =
      DigestsOf(model, tokens, model.Run({tokens}, schedule)[0], *schedule.make_ops());
  EXPECT_EQ(actual, GoldenDigests(GetParam())) << "\"" << GetParam() << "\": " << actual.dump(2);
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenTest, testing::ValuesIn(GoldenNames()),
                         testing_support::TestName);

}  // namespace
}  // namespace isobit::invariance
