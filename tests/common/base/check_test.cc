// A broken invariant stops the process and says where and why.
#include "common/base/check.h"

#include "gtest/gtest.h"

namespace isobit {
namespace {

TEST(CheckTest, PassesAndEvaluatesOnce) {
  int calls = 0;
  ISOBIT_CHECK(++calls > 0) << "never printed";
  EXPECT_EQ(calls, 1);
}

TEST(CheckTest, DoesNotCaptureAnElse) {
  bool reached = false;
  if (false)
    ISOBIT_CHECK(true);
  else
    reached = true;
  EXPECT_TRUE(reached);
}

TEST(CheckDeathTest, AbortsWithFileConditionAndMessage) {
  const int rows = 0;
  EXPECT_DEATH(ISOBIT_CHECK(rows > 0) << "rows " << rows,
               "check_test.cc:[0-9]+: check failed: rows > 0 rows 0");
}

}  // namespace
}  // namespace isobit
