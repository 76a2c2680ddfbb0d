// Requests must not lead out of the model root.
#include "common/checkpoint/model_directory.h"

#include <filesystem>
#include <string>
#include <utility>

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

// A snapshot as huggingface_hub lays it out, whose files are links to ../../blobs.
TEST_F(ModelDirectoryTest, FilesOfASnapshotMayLieInItsBlobs) {
  namespace fs = std::filesystem;
  const std::string model = root_ + "/models--org--name";
  const std::string snapshot = model + "/snapshots/0123abc";
  fs::create_directories(snapshot + "/nested");
  fs::create_directories(model + "/blobs");
  fs::create_directories(root_ + "/models--other/blobs");
  outer_.Write("root/models--org--name/blobs/f00d", "");
  outer_.Write("root/models--org--name/note", "");
  outer_.Write("root/models--other/blobs/f00d", "");
  outer_.Write("secret/blob", "");
  fs::create_symlink("../../blobs/f00d", snapshot + "/config.json");
  fs::create_symlink("../../../blobs/f00d", snapshot + "/nested/config.json");
  fs::create_symlink("../../note", snapshot + "/beside");
  fs::create_symlink("../../../models--other/blobs/f00d", snapshot + "/other");
  fs::create_symlink("../../../../secret/blob", snapshot + "/secret");
  for (const std::string root : {"", "/snapshots", "/snapshots/0123abc"}) {
    const std::string inside = root.empty() ? "" : model + root;
    EXPECT_EQ(*ResolveFileInside(snapshot, "config.json", inside), model + "/blobs/f00d");
    for (const char* name : {"beside", "other", "secret"}) {
      EXPECT_THAT(ResolveFileInside(snapshot, name, inside),
                  StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("leads outside")))
          << name << " of " << inside;
    }
  }
  EXPECT_EQ(*ResolveFileInside(snapshot + "/nested", "config.json"), model + "/blobs/f00d");
  // Blobs that the models of a cache share: huggingface_hub 1.x keeps weights there.
  const std::string hash(64, 'a');
  const std::string shared = root_ + "/blobs/aa/" + hash;
  fs::create_directories(root_ + "/blobs/aa");
  fs::create_directories(root_ + "/blobs/bb");
  for (const std::string& path :
       {"blobs/aa/" + hash, "blobs/bb/" + hash, std::string("blobs/aa/note")}) {
    outer_.Write("root/" + path, "");
  }
  fs::create_symlink("../../blobs/aa/" + hash, model + "/blobs/cafe");
  fs::create_symlink("../../blobs/cafe", snapshot + "/model.safetensors");
  EXPECT_EQ(*ResolveFileInside(snapshot, "model.safetensors", model + "/snapshots"), shared);
  fs::create_symlink("../../../blobs/bb/" + hash, snapshot + "/misplaced");
  fs::create_symlink("../../../blobs/aa/note", snapshot + "/note");
  EXPECT_FALSE(ResolveFileInside(snapshot, "misplaced", model + "/snapshots").ok());
  EXPECT_FALSE(ResolveFileInside(snapshot, "note", model + "/snapshots").ok());
  // What only looks like a snapshot.
  for (const auto& [folder, inner] :
       {std::pair("models--x", "snapshot"), std::pair("x", "snapshots")}) {
    const std::string looks = root_ + "/" + folder + "/" + inner + "/0123abc";
    fs::create_directories(looks);
    fs::create_directories(root_ + "/" + folder + "/blobs");
    outer_.Write(std::string("root/") + folder + "/blobs/f00d", "");
    fs::create_symlink("../../blobs/f00d", looks + "/config.json");
    EXPECT_FALSE(ResolveFileInside(looks, "config.json").ok()) << folder;
  }
  // Blobs that lead elsewhere themselves.
  fs::remove_all(model + "/blobs");
  fs::create_symlink("../../secret", model + "/blobs");
  outer_.Write("secret/f00d", "");
  EXPECT_FALSE(ResolveFileInside(snapshot, "config.json").ok());
}

}  // namespace
}  // namespace isobit
