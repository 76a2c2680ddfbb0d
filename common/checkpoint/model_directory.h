// Confines paths that come from requests, or from files inside a model directory, to a directory
// that the operator chose.
#ifndef ISOBIT_COMMON_CHECKPOINT_MODEL_DIRECTORY_H_
#define ISOBIT_COMMON_CHECKPOINT_MODEL_DIRECTORY_H_

#include <string>

#include "absl/status/statusor.h"

namespace isobit {

// The canonical path of the model directory `requested`, a path relative to `model_root`. Symlinks
// are followed, but must end inside `model_root`. INVALID_ARGUMENT: the path is empty or absolute,
// contains ".." or a NUL byte, leads outside, or is no directory. NOT_FOUND: it does not exist.
absl::StatusOr<std::string> ResolveModelPath(const std::string& model_root,
                                             const std::string& requested);

// The canonical path of the file `name` in `directory`. `name` must be a plain file name. Symlinks
// must end inside `root` (empty: inside `directory`). Those of a snapshot in the hub's cache,
// models--ORG--NAME/snapshots/REVISION, may also end in its models--ORG--NAME/blobs, or be a hash
// in the cache's common blobs. Errors: as above.
absl::StatusOr<std::string> ResolveFileInside(const std::string& directory, const std::string& name,
                                              const std::string& root = "");

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_MODEL_DIRECTORY_H_
