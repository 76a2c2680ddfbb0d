// Small files that a running server reads again when they change: how it notices a change, and how
// it reads them.
#ifndef ISOBIT_COMMON_RPC_FILE_STAMP_H_
#define ISOBIT_COMMON_RPC_FILE_STAMP_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace isobit {

// Differs after a file is written or replaced, also through a symlink. All zero: no file.
struct FileStamp {
  uint64_t device = 0, inode = 0;
  int64_t size = 0, modified_ns = 0, changed_ns = 0;
  // The last change is a while ago. File system clocks tick slowly, so the stamp does not show a
  // second change in the same tick: whoever has read a file that was not settled reads it once
  // more.
  bool is_settled = false;
  bool operator==(const FileStamp&) const = default;
};

// Take the stamp before reading the file: the next stamp then shows a change during the read.
FileStamp StampOf(const std::string& path);

// The whole of a file of at most 1 MiB. `what` names it in errors, such as "--tls_cert".
// INVALID_ARGUMENT: empty, too large or not a regular file; NOT_FOUND and the like: it cannot be
// read.
absl::StatusOr<std::string> ReadSmallFile(const std::string& what, const std::string& path);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_FILE_STAMP_H_
