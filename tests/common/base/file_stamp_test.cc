// Errors of small files that are read whole. tests/attack/ tests files that change.
#include "common/base/file_stamp.h"

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

TEST(ReadSmallFileTest, SaysWhatIsWrongWithAPath) {
  const testing_support::TempDir dir;
  const std::string file = dir.Write("file", "text");
  EXPECT_EQ(*ReadSmallFile("--flag", file), "text");
  EXPECT_THAT(ReadSmallFile("--flag", dir.File("none")).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("--flag " + dir.File("none"))));
  // A path that goes through a file is the caller's mistake, and no state that waiting would end.
  EXPECT_THAT(ReadSmallFile("--flag", file + "/x").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("Not a directory")));
  EXPECT_THAT(ReadSmallFile("--flag", dir.path()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace isobit
