// Keeps paths that come from requests, or from files inside a model directory, inside a directory
// that the operator chose.
#ifndef ISOBIT_COMMON_CHECKPOINT_MODEL_DIRECTORY_H_
#define ISOBIT_COMMON_CHECKPOINT_MODEL_DIRECTORY_H_

#include <string>

#include "absl/status/statusor.h"

namespace isobit {

// The canonical path of the model directory `requested`, a path relative to `model_root`. Symlinks
// are followed, but must end inside `model_root`. INVALID_ARGUMENT: empty, absolute, contains "..",
// a NUL byte, leads outside, or is no directory; NOT_FOUND: does not exist.
absl::StatusOr<std::string> ResolveModelPath(const std::string& model_root,
                                             const std::string& requested);

// Returns the canonical path of the file `name` in `directory`. `name` must be a plain file name,
// and symlinks must end inside `root` (empty: inside `directory`); those of a snapshot in the hub's
// cache, models--ORG--NAME/snapshots/REVISION, may also end in its models--ORG--NAME/blobs, or be a
// hash in the cache's blobs, which its models share. Errors: as above.
absl::StatusOr<std::string> ResolveFileInside(const std::string& directory, const std::string& name,
                                              const std::string& root = "");

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_MODEL_DIRECTORY_H_
