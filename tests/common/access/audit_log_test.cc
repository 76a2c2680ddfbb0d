// Where audit lines go, and what is logged if they cannot go there. call_gate_test.cc tests their
// content.
#include "common/access/audit_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "common/base/descriptor.h"
#include "common/base/log.h"
#include "gtest/gtest.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::FileSizeLimit;
using testing_support::StatusIs;
using testing_support::TempDir;

AuditEntry Entry() {
  return {.client = "x", .caller_address = "", .method = "/a/B", .arguments = "", .outcome = {}};
}

TEST(AuditLogTest, AFileThatCannotBeOpenedIsNamed) {
  const TempDir dir;
  EXPECT_THAT(AuditLog::Open(dir.path()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--audit_log " + dir.path() + ": Is a directory")));
}

mode_t ModeOf(const std::string& path) {
  struct stat info = {};
  EXPECT_EQ(stat(path.c_str(), &info), 0);
  return info.st_mode & 07777;
}

std::string TextOf(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(AuditLogTest, AFileIsItsOwnersAloneAndNoLink) {
  const TempDir dir;
  const std::string path = dir.Write("audit", "");
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<AuditLog> log, AuditLog::Open(path));
  EXPECT_EQ(ModeOf(path), 0600u);
  ASSERT_EQ(unlink(path.c_str()), 0);
  log->Write(Entry());
  EXPECT_EQ(ModeOf(path), 0600u) << "a new one after the old was moved away";
  EXPECT_THAT(TextOf(path), HasSubstr("/a/B"));
  ASSERT_EQ(symlink(path.c_str(), dir.File("link").c_str()), 0);
  EXPECT_THAT(AuditLog::Open(dir.File("link")).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("got a symbolic link")));
}

// INVARIANT: no start, and no call, waits for who reads the audit log.
TEST(AuditLogTest, AFifoIsNeverWaitedFor) {
  const TempDir dir;
  const std::string path = dir.File("fifo");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<AuditLog> log, AuditLog::Open(path));
  const uint64_t lost = AuditLinesLost();
  FlushLog();
  testing::internal::CaptureStderr();
  log->Write(Entry());
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("the line was: audit {"));
  EXPECT_EQ(AuditLinesLost(), lost + 1);

  const Descriptor reader(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  log->Write(Entry());
  std::array<char, 4096> line;
  const ssize_t size = read(reader.get(), line.data(), line.size());
  ASSERT_GT(size, 0);
  EXPECT_EQ(line[0], '{');
  EXPECT_THAT(std::string(line.data(), static_cast<size_t>(size)), HasSubstr("/a/B"));
  EXPECT_EQ(AuditLinesLost(), lost + 1);

  testing::internal::CaptureStderr();
  for (int i = 0; i < 2000; ++i) log->Write(Entry());
  testing::internal::GetCapturedStderr();
  EXPECT_GT(AuditLinesLost(), lost + 1) << "the FIFO is full";
}

TEST(AuditLogTest, ALineThatFitsOnlyInPartIsInTheLogWithTheReason) {
  const TempDir dir;
  // Long, so that the limit leaves room for the log.
  const std::string path = dir.Write("audit", std::string(100'000, '\n'));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<AuditLog> log, AuditLog::Open(path));
  testing::internal::CaptureStderr();
  {
    const FileSizeLimit limit(100'010);
    log->Write(Entry());
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("--audit_log " + path + ": File too large"));
  EXPECT_THAT(said, HasSubstr("/a/B"));
  EXPECT_GT(AuditLinesLost(), 0u);
}

}  // namespace
}  // namespace isobit
