// Temporary file, fsync, rename, fsync of the directory.
#include "common/checkpoint/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/base/file_error.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

absl::Status ErrnoStatus(absl::string_view action, const std::string& path) {
  return FileError(errno, absl::StrCat("cannot ", action, " ", path));
}

absl::Status WriteAll(int fd, absl::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return ErrnoStatus("write", path);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status WriteAndSync(int fd, const std::vector<absl::string_view>& pieces,
                          const std::string& path) {
  for (const absl::string_view piece : pieces) {
    ISOBIT_RETURN_IF_ERROR(WriteAll(fd, piece, path));
  }
  // mkostemp makes the file private; a checkpoint is as readable as any other file of its owner.
  if (fchmod(fd, 0644) != 0) return ErrnoStatus("set the mode of", path);
  if (fsync(fd) != 0) return ErrnoStatus("sync", path);
  return absl::OkStatus();
}

// A rename is durable only once its directory is.
absl::Status SyncDirectory(const std::string& directory) {
  const int fd = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus("open", directory);
  const absl::Status status = fsync(fd) == 0 ? absl::OkStatus() : ErrnoStatus("sync", directory);
  close(fd);
  return status;
}

}  // namespace

absl::Status WriteFileAtomically(const std::string& path,
                                 const std::vector<absl::string_view>& pieces) {
  std::string temporary = absl::StrCat(path, ".XXXXXX");
  const int fd = mkostemp(temporary.data(), O_CLOEXEC);
  if (fd < 0) return ErrnoStatus("create", temporary);
  absl::Status status = WriteAndSync(fd, pieces, temporary);
  if (close(fd) != 0 && status.ok()) status = ErrnoStatus("close", temporary);
  if (status.ok() && std::rename(temporary.c_str(), path.c_str()) != 0) {
    status = ErrnoStatus("rename to", path);
  }
  if (!status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  const std::string directory = std::filesystem::path(path).parent_path().string();
  return SyncDirectory(directory.empty() ? "." : directory);
}

}  // namespace isobit
