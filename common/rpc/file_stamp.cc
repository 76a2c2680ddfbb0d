// Stamps by stat, and the read of a whole small file.
#include "common/rpc/file_stamp.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/file_error.h"

namespace isobit {
namespace {

constexpr off_t kMaxBytes = 1 << 20;
constexpr int64_t kSettledNs = 100'000'000;

int64_t Nanoseconds(const timespec& time) { return time.tv_sec * 1'000'000'000 + time.tv_nsec; }

absl::StatusOr<std::string> ReadAll(const std::string& what, const std::string& path, int fd) {
  struct stat info = {};
  if (fstat(fd, &info) != 0) return FileError(errno, absl::StrCat(what, " ", path));
  if (!S_ISREG(info.st_mode) || info.st_size == 0 || info.st_size > kMaxBytes) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", path, ": ", info.st_size,
                                                   " bytes, expected a file of 1 to ", kMaxBytes));
  }
  std::string text(static_cast<size_t>(info.st_size), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = read(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError(errno, absl::StrCat(what, " ", path));
    if (n == 0) break;  // the file was truncated meanwhile
    done += static_cast<size_t>(n);
  }
  text.resize(done);
  return text;
}

}  // namespace

FileStamp StampOf(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) return {};
  const int64_t modified = Nanoseconds(info.st_mtim), changed = Nanoseconds(info.st_ctim);
  return {.device = info.st_dev,
          .inode = info.st_ino,
          .size = info.st_size,
          .modified_ns = modified,
          .changed_ns = changed,
          .is_settled = absl::GetCurrentTimeNanos() - std::max(modified, changed) > kSettledNs};
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& what, const std::string& path) {
  // O_NONBLOCK, so that a path that is a pipe does not wait.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileError(errno, absl::StrCat(what, " ", path));
  absl::StatusOr<std::string> text = ReadAll(what, path, fd);
  close(fd);
  return text;
}

}  // namespace isobit
