// Only whole JSON objects are taken, within bounds.
#include "common/checkpoint/strict_json.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

TEST(StrictJsonTest, NothingMayFollowTheObject) {
  ISOBIT_EXPECT_OK(ParseJsonObject("{\"a\": 1} \r\n\t", "file").status());
  const std::string object = "{\"a\": 1}";
  for (const std::string& tail :
       {std::string("\0", 1), std::string("\0{\"b\": 2}", 9), std::string(" \0 ", 3),
        std::string("{\"b\": 2}"), std::string(","), std::string("]"), std::string("x")}) {
    EXPECT_THAT(ParseJsonObject(object + tail, "file").status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("file: not valid JSON")))
        << tail;
  }
  EXPECT_THAT(ParseJsonObject(std::string("{\"a\0\": 1}", 9), "file").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at byte 4: a NUL")));
}

TEST(StrictJsonTest, AnErrorNamesTheKeyBeforeIt) {
  for (const char* number : {"NaN", "Infinity", "-Infinity", "1e999"}) {
    const std::string text = absl::StrCat("{\"a\": 1, \"rms_norm_eps\": ", number, "}");
    EXPECT_THAT(ParseJsonObject(text, "file").status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"rms_norm_eps\"")))
        << number;
  }
}

TEST(StrictJsonTest, DepthIsBounded) {
  const auto nested = [](size_t depth) {
    return absl::StrCat("{\"a\":", std::string(depth, '['), std::string(depth, ']'), "}");
  };
  ISOBIT_EXPECT_OK(ParseJsonObject(nested(31), "file").status());
  for (const size_t depth : {size_t{32}, size_t{100'000}}) {
    EXPECT_THAT(ParseJsonObject(nested(depth), "file").status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("nested deeper than 32")));
  }
}

}  // namespace
}  // namespace isobit
