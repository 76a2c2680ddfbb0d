// Errors of the file system as statuses.
#ifndef ISOBIT_COMMON_BASE_FILE_ERROR_H_
#define ISOBIT_COMMON_BASE_FILE_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace isobit {

// "`what`: " and the text of `error`, an errno that is not 0. NOT_FOUND: the file does not exist.
// INVALID_ARGUMENT: the path cannot lead to a file: it goes through a file, has a loop of links, or
// has a name that is too long. PERMISSION_DENIED. RESOURCE_EXHAUSTED: there is no memory,
// descriptor or space. INTERNAL: anything else, such as a failing disk.
absl::Status FileError(int error, absl::string_view what);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_FILE_ERROR_H_
