// Requests must not lead out of the model root.
#include "common/checkpoint/model_directory.h"

#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;
using testing_support::TempDir;

class ModelDirectoryTest : public testing::Test {
 protected:
  // outer/root/{a/b, inside -> a, outside -> ../secret, loop -> loop, file} and outer/{secret,
  // root2}
  ModelDirectoryTest() : root_(outer_.File("root")) {
    namespace fs = std::filesystem;
    fs::create_directories(root_ + "/a/b");
    fs::create_directories(outer_.File("secret"));
    fs::create_directories(outer_.File("root2"));
    fs::create_symlink("a", root_ + "/inside");
    fs::create_symlink("../secret", root_ + "/outside");
    fs::create_symlink("../root2", root_ + "/sibling");
    fs::create_symlink("loop", root_ + "/loop");
    outer_.Write("root/file", "");
  }

  const TempDir outer_;
  const std::string root_;
};

TEST_F(ModelDirectoryTest, ResolvesWhatIsInside) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::string nested, ResolveModelPath(root_, "a/b"));
  EXPECT_EQ(nested, root_ + "/a/b");
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::string link, ResolveModelPath(root_, "inside/b/"));
  EXPECT_EQ(std::filesystem::path(link).lexically_normal(), root_ + "/a/b");
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::string self, ResolveModelPath(root_ + "/", "."));
  EXPECT_EQ(self, root_);
}

TEST_F(ModelDirectoryTest, RejectsWhatIsNot) {
  const struct {
    std::string requested;
    const char* message;
  } kCases[] = {
      {"", "model path is empty"},
      {"/etc", "is absolute"},
      {root_ + "/a", "is absolute"},
      {"..", "contains \"..\""},
      {"a/../../secret", "contains \"..\""},
      {"a/..", "contains \"..\""},
      {"outside", "leads outside"},
      {"sibling", "leads outside"},  // a prefix of the name is not the parent
      {"file", "is not a directory"},
      {std::string("a\0/../../secret", 15), "NUL byte"},
  };
  for (const auto& test : kCases) {
    EXPECT_THAT(ResolveModelPath(root_, test.requested),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(test.message)))
        << test.requested;
  }
  EXPECT_THAT(ResolveModelPath(root_, "absent"), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_FALSE(ResolveModelPath(root_, "loop").ok());
  EXPECT_FALSE(ResolveModelPath(root_, std::string(100000, 'x')).ok());
}

}  // namespace
}  // namespace isobit
