// Files with what clients ask and get. Only their owner may read them.
#ifndef ISOBIT_COMMON_BASE_PRIVATE_FILE_H_
#define ISOBIT_COMMON_BASE_PRIVATE_FILE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/descriptor.h"

namespace isobit {

// Opens `path` by open(2) with `flags`. Never waits (as for a FIFO's reader), and does not follow a
// symbolic link at the end of the path. A regular file then has mode 0600, whatever it had before.
// `what`: goes before the path in errors. Errors: those of FileError; PERMISSION_DENIED: others may
// read the file, and this process may not change that.
absl::StatusOr<Descriptor> OpenPrivateFile(const std::string& path, int flags,
                                           absl::string_view what);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_PRIVATE_FILE_H_
