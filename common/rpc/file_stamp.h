// Small files that a running server takes up again when they change: how it sees that they did, and
// reads them.
#ifndef ISOBIT_COMMON_RPC_FILE_STAMP_H_
#define ISOBIT_COMMON_RPC_FILE_STAMP_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace isobit {

// What changes when a file is written or replaced, also by way of a symlink. All zero: no file.
struct FileStamp {
  uint64_t device = 0, inode = 0;
  int64_t size = 0, modified_ns = 0, changed_ns = 0;
  // The file was left alone for a while. Clocks of file systems tick slowly, so a second change in
  // the same tick shows nowhere else: whoever read an unsettled file reads it once more.
  bool is_settled = false;
  bool operator==(const FileStamp&) const = default;
};

// Take it before reading: a change while one reads then shows in the next stamp.
FileStamp StampOf(const std::string& path);

// The whole of a file of at most 1 MiB. `what` names it in errors, such as "--tls_cert".
// INVALID_ARGUMENT: empty, too large or not a regular file; NOT_FOUND and the like: it cannot be
// read.
absl::StatusOr<std::string> ReadSmallFile(const std::string& what, const std::string& path);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_FILE_STAMP_H_
