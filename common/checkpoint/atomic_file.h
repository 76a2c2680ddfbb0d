// Writes a file so that a reader sees either the old or the new contents, never a mixture.
#ifndef ISOBIT_COMMON_CHECKPOINT_ATOMIC_FILE_H_
#define ISOBIT_COMMON_CHECKPOINT_ATOMIC_FILE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace isobit {

// Writes `pieces` in order to a temporary file beside `path`, syncs it, and renames it to `path`.
// On an error, that of the failing system call, `path` is unchanged and no temporary file remains.
absl::Status WriteFileAtomically(const std::string& path,
                                 const std::vector<absl::string_view>& pieces);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_ATOMIC_FILE_H_
