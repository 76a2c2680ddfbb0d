// Errors of the file system as statuses.
#ifndef ISOBIT_COMMON_BASE_FILE_ERROR_H_
#define ISOBIT_COMMON_BASE_FILE_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace isobit {

// "`what`: " and the text of `error`, an errno that is not 0. NOT_FOUND: nothing there.
// INVALID_ARGUMENT: a path that cannot lead to a file (through a file, a circle of links, a name
// too long). PERMISSION_DENIED. RESOURCE_EXHAUSTED: out of memory, descriptors or space. INTERNAL:
// anything else, such as a disk that fails.
absl::Status FileError(int error, absl::string_view what);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_FILE_ERROR_H_
