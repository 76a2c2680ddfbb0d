// Files of prompts are their owner's alone, and are what their path says.
#include "common/base/private_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

mode_t ModeOf(const std::string& path) {
  struct stat info = {};
  EXPECT_EQ(stat(path.c_str(), &info), 0);
  return info.st_mode & 07777;
}

TEST(PrivateFileTest, IsItsOwnersAlone) {
  const testing_support::TempDir dir;
  const std::string old = dir.Write("old", "x");
  ASSERT_EQ(chmod(old.c_str(), 0664), 0);
  ISOBIT_EXPECT_OK(OpenPrivateFile(old, O_WRONLY, "what").status());
  EXPECT_EQ(ModeOf(old), 0600u);
  const mode_t before = umask(0);
  ISOBIT_EXPECT_OK(OpenPrivateFile(dir.File("new"), O_WRONLY | O_CREAT, "what").status());
  umask(before);
  EXPECT_EQ(ModeOf(dir.File("new")), 0600u);
}

TEST(PrivateFileTest, NoLinkIsFollowed) {
  const testing_support::TempDir dir;
  const std::string target = dir.Write("target", "x");
  ASSERT_EQ(chmod(target.c_str(), 0644), 0);
  const std::string link = dir.File("link");
  ASSERT_EQ(symlink(target.c_str(), link.c_str()), 0);
  EXPECT_THAT(OpenPrivateFile(link, O_WRONLY | O_CREAT, "--flag").status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--flag " + link + ": expected a file, got a symbolic link")));
  EXPECT_EQ(ModeOf(target), 0644u);
}

TEST(PrivateFileTest, AFifoIsNotWaitedFor) {
  const testing_support::TempDir dir;
  const std::string fifo = dir.File("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0644), 0);
  EXPECT_FALSE(OpenPrivateFile(fifo, O_WRONLY, "what").ok()) << "nobody reads";
  const Descriptor reader(open(fifo.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  ISOBIT_EXPECT_OK(OpenPrivateFile(fifo, O_WRONLY, "what").status());
}

TEST(PrivateFileTest, AFileOfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const testing_support::TempDir dir;
  const std::string path = dir.Write("theirs", "x");
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  ASSERT_EQ(chmod(dir.path().c_str(), 0755), 0);
  ASSERT_EQ(seteuid(65534), 0);
  const absl::Status status = OpenPrivateFile(path, O_WRONLY, "what").status();
  ASSERT_EQ(seteuid(0), 0);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("got 666")));
}

}  // namespace
}  // namespace isobit
