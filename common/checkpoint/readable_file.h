// A file that is read into private memory, never mapped. If another process shortens or overwrites
// it meanwhile, this process does not crash, and bytes already read do not change.
#ifndef ISOBIT_COMMON_CHECKPOINT_READABLE_FILE_H_
#define ISOBIT_COMMON_CHECKPOINT_READABLE_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isobit {

// Movable, not copyable; reads are thread-safe. Refers to the file that was opened, even if another
// file is renamed to its path.
class ReadableFile {
 public:
  // `name`: used in place of `path` in errors of the other calls. Errors: NOT_FOUND, or as errno
  // says; INVALID_ARGUMENT: `path` is not a regular file.
  static absl::StatusOr<ReadableFile> Open(const std::string& path, std::string name);

  ReadableFile(ReadableFile&& other) noexcept;
  ReadableFile& operator=(ReadableFile&& other) noexcept;
  ~ReadableFile();

  // The size in bytes when the file was opened.
  uint64_t size() const { return size_; }

  // Reads the bytes [offset, offset + size) to `out`. INVALID_ARGUMENT: the file has become shorter
  // and ends before them. Other errors: as errno says.
  absl::Status ReadAt(uint64_t offset, size_t size, void* out) const;

  // INVALID_ARGUMENT: the file was written to, or changed its size, since it was opened, so bytes
  // that were read may belong to two versions of it. Cannot detect writes through a memory map, nor
  // a write call that had begun before the file was opened.
  absl::Status CheckUnchanged() const;

 private:
  ReadableFile(int fd, std::string name) : fd_(fd), name_(std::move(name)) {}

  int fd_;  // -1 when moved from
  std::string name_;
  uint64_t size_ = 0;
  int64_t modified_ns_ = 0;  // time of the last modification, when it was opened
};

// The contents of a text file. Errors: those of ReadableFile; INVALID_ARGUMENT: it is longer than
// `max_bytes`.
absl::StatusOr<std::string> ReadTextFile(const std::string& path, size_t max_bytes);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_READABLE_FILE_H_
