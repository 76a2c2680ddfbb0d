// Where audit lines go, and what is logged if they cannot go there. call_gate_test.cc tests their
// content.
#include "common/rpc/audit_log.h"

#include <signal.h>
#include <sys/resource.h>

#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;
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

// Lets files grow to that size and no further, as long as it lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit low = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &low);
    old_handler_ = signal(SIGXFSZ, SIG_IGN);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit before_;
  sighandler_t old_handler_;
};

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
}

}  // namespace
}  // namespace isobit
