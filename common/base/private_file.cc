// Opens files with mode 0600 and refuses links.
#include "common/base/private_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/file_error.h"

namespace isobit {
namespace {

constexpr mode_t kMode = 0600;

}  // namespace

absl::StatusOr<Descriptor> OpenPrivateFile(const std::string& path, int flags,
                                           absl::string_view what) {
  const std::string name = absl::StrCat(what, what.empty() ? "" : " ", path);
  Descriptor file(
      open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, kMode));
  if (!file.is_open() && errno == ELOOP) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": expected a file, got a symbolic link, which may lead anywhere"));
  }
  if (!file.is_open()) return FileError(errno, name);
  struct stat info = {};
  if (fstat(file.get(), &info) != 0) return FileError(errno, name);
  const bool is_open_to_others = S_ISREG(info.st_mode) && (info.st_mode & 077) != 0;
  if (is_open_to_others && fchmod(file.get(), kMode) != 0) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "%s: expected mode 600, as it holds what clients ask, got %o, which only its owner, user "
        "%d, can change",
        name, info.st_mode & 07777, info.st_uid));
  }
  return file;
}

}  // namespace isobit
