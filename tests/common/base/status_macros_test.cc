// The status macros, and the matchers that the rest of the tests rely on.
#include "common/base/status_macros.h"

#include <limits>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/bitwise.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing_support::BitwiseEqual;
using testing_support::IsOk;
using testing_support::StatusIs;

absl::StatusOr<std::unique_ptr<int>> Box(int value) {
  if (value < 0) return absl::OutOfRangeError("value below 0");
  return std::make_unique<int>(value);
}

absl::StatusOr<int> Sum(int a, int b) {
  ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<int> x, Box(a));
  ISOBIT_ASSIGN_OR_RETURN(const auto y, Box(b));
  return *x + *y;
}

absl::Status Check(int a, int b) {
  ISOBIT_RETURN_IF_ERROR(Sum(a, b).status());
  return absl::OkStatus();
}

TEST(StatusMacrosTest, PassesValuesAndErrors) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const int sum, Sum(2, 3));
  EXPECT_EQ(sum, 5);
  EXPECT_THAT(Sum(2, -3), StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("below 0")));
  ISOBIT_EXPECT_OK(Check(1, 2));
  EXPECT_THAT(Check(-1, 2), StatusIs(absl::StatusCode::kOutOfRange));
}

TEST(StatusMatchersTest, CanFail) {
  EXPECT_THAT(absl::NotFoundError("x"), Not(IsOk()));
  EXPECT_THAT(absl::NotFoundError("x"), Not(StatusIs(absl::StatusCode::kInternal)));
  EXPECT_THAT(absl::NotFoundError("x"), Not(StatusIs(absl::StatusCode::kNotFound, HasSubstr("y"))));
}

TEST(BitwiseEqualTest, TellsZerosAndNansApart) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(BitwiseEqual(nan, nan));
  EXPECT_FALSE(BitwiseEqual(nan, -nan));
  EXPECT_FALSE(BitwiseEqual(0.0f, -0.0f));
}

TEST(BitwiseEqualTest, ReportsCountFirstIndexAndBothValues) {
  const float actual[] = {1.0f, 2.0f, 3.0f};
  const float expected[] = {1.0f, 2.5f, -3.0f};
  const testing::AssertionResult result = BitwiseEqual(actual, expected);
  EXPECT_STREQ(result.message(),
               "2 of 3 elements differ; first at [1]: 0x1p+1 (0x40000000), expected 0x1.4p+1 "
               "(0x40200000)");
  EXPECT_FALSE(BitwiseEqual(std::span(actual).first(2), expected));
}

TEST(TempDirTest, WritesAndRemoves) {
  std::string path;
  {
    testing_support::TempDir dir;
    path = dir.Write("a", std::string("\0b", 2));
    FILE* file = std::fopen(path.c_str(), "rb");
    ASSERT_NE(file, nullptr);
    char bytes[4];
    EXPECT_EQ(std::fread(bytes, 1, sizeof(bytes), file), 2u);
    std::fclose(file);
  }
  EXPECT_EQ(std::fopen(path.c_str(), "rb"), nullptr);
}

}  // namespace
}  // namespace isobit
