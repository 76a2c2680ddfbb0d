// open, pread and fstat with errors as statuses.
#include "common/checkpoint/readable_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/file_error.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

int64_t ModifiedNanoseconds(const struct stat& info) {
  return int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
}

}  // namespace

absl::StatusOr<ReadableFile> ReadableFile::Open(const std::string& path, std::string name) {
  // O_NONBLOCK: opening a FIFO must fail the type check below, not wait for a writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileError(errno, absl::StrCat("cannot open ", path));
  ReadableFile file(fd, std::move(name));
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return FileError(errno, absl::StrCat("cannot stat ", path));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  file.size_ = static_cast<uint64_t>(info.st_size);
  file.modified_ns_ = ModifiedNanoseconds(info);
  return file;
}

ReadableFile::ReadableFile(ReadableFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      name_(std::move(other.name_)),
      size_(other.size_),
      modified_ns_(other.modified_ns_) {}

ReadableFile& ReadableFile::operator=(ReadableFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(name_, other.name_);
  std::swap(size_, other.size_);
  std::swap(modified_ns_, other.modified_ns_);
  return *this;
}

ReadableFile::~ReadableFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status ReadableFile::ReadAt(uint64_t offset, size_t size, void* out) const {
  auto* to = static_cast<char*>(out);
  while (size > 0) {
    const ssize_t count = pread(fd_, to, size, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, absl::StrCat("cannot read ", name_));
    if (count == 0) {
      return absl::InvalidArgumentError(absl::StrCat(name_, " ended at or before byte ", offset,
                                                     ", expected ", size_,
                                                     " bytes: it was changed while it was read"));
    }
    to += count;
    offset += static_cast<uint64_t>(count);
    size -= static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

absl::Status ReadableFile::CheckUnchanged() const {
  struct stat info;
  if (fstat(fd_, &info) != 0) return FileError(errno, absl::StrCat("cannot stat ", name_));
  if (static_cast<uint64_t>(info.st_size) == size_ && ModifiedNanoseconds(info) == modified_ns_) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(name_, " was changed while it was read"));
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path, size_t max_bytes) {
  ISOBIT_ASSIGN_OR_RETURN(const ReadableFile file, ReadableFile::Open(path, path));
  if (file.size() > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has ", file.size(), " bytes, limit ", max_bytes));
  }
  std::string text(file.size(), '\0');
  ISOBIT_RETURN_IF_ERROR(file.ReadAt(0, text.size(), text.data()));
  ISOBIT_RETURN_IF_ERROR(file.CheckUnchanged());
  return text;
}

}  // namespace isobit
