// Checks that a port file can be written, and writes it.
#include "common/rpc/port_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "common/base/file_error.h"

namespace isobit {

absl::Status CheckPortFile(const std::string& path) {
  struct stat info;
  if (path.empty() || lstat(path.c_str(), &info) != 0 || S_ISREG(info.st_mode)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("port file ", path, ": expected a regular file or none, got something else"));
}

// Rename is atomic.
absl::Status WritePortFile(const std::string& path, int port) {
  const std::string partial = absl::StrCat(path, ".partial.", getpid());
  std::remove(partial.c_str());
  // x: the file is a new one, not what a link of that name leads to.
  std::FILE* file = std::fopen(partial.c_str(), "wxe");
  if (file == nullptr) return FileError(errno, absl::StrCat("port file ", partial));
  const bool written = std::fprintf(file, "%d\n", port) > 0;
  const bool closed = std::fclose(file) == 0;
  if (written && closed && std::rename(partial.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const absl::Status error = FileError(errno, absl::StrCat("port file ", path));
  std::remove(partial.c_str());
  return error;
}

}  // namespace isobit
