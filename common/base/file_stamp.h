// Small files that a running server reads again when they change: how to notice a change, and how
// to read them.
#ifndef ISOBIT_COMMON_BASE_FILE_STAMP_H_
#define ISOBIT_COMMON_BASE_FILE_STAMP_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace isobit {

// Changes when a file is written or replaced, also through a symlink. All zero: no file.
struct FileStamp {
  uint64_t device = 0, inode = 0;
  int64_t size = 0, modified_ns = 0, changed_ns = 0;
  // Whether the last change is some time ago. Clocks of file systems tick slowly, so the stamp does
  // not show a second change within a tick. So read a file again if it was not settled when it was
  // read.
  bool is_settled = false;
  bool operator==(const FileStamp&) const = default;
};

// Take the stamp before you read the file: the next stamp then shows a change during the read.
FileStamp StampOf(const std::string& path);

// The content of a file of at most 1 MiB. `what` names it in errors, such as "--tls_cert".
// INVALID_ARGUMENT: it is empty, too large or not a regular file. NOT_FOUND and others: it cannot
// be read.
absl::StatusOr<std::string> ReadSmallFile(const std::string& what, const std::string& path);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_FILE_STAMP_H_
