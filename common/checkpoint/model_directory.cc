// Path containment: first a check of the text of the path, then one of the canonical path that the
// file system gives.
#include "common/checkpoint/model_directory.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/file_error.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/strict_json.h"  // Quoted

namespace isobit {
namespace {

namespace fs = std::filesystem;

absl::StatusOr<fs::path> Canonical(const fs::path& path, const std::string& shown) {
  std::error_code error;
  fs::path canonical = fs::canonical(path, error);
  if (!error) return canonical;
  return FileError(error.value(), absl::StrCat("cannot resolve ", shown));
}

// Whether `path` is `root` or below it. Both are canonical.
bool IsInside(const fs::path& root, const fs::path& path) {
  return std::mismatch(root.begin(), root.end(), path.begin(), path.end()).first == root.end();
}

bool IsHex(const std::string& text, size_t digits) {
  return text.size() == digits && std::all_of(text.begin(), text.end(), absl::ascii_isxdigit);
}

// Whether `file` is where the hub's cache keeps the files of the snapshot `directory`, which is
// models--ORG--NAME/snapshots/REVISION or below it: in models--ORG--NAME/blobs, or in the blobs
// that all models of the cache share, as blobs/ab/ab01... beside models--ORG--NAME. Both are
// canonical.
bool IsBlobOfSnapshot(const fs::path& directory, const fs::path& file) {
  for (fs::path path = directory; path.has_relative_path(); path = path.parent_path()) {
    const fs::path parent = path.parent_path();
    const fs::path model = parent.parent_path();
    if (parent.filename() != "snapshots") continue;
    if (!absl::StartsWith(model.filename().string(), "models--")) continue;
    const std::string hash = file.filename().string();
    return IsInside(model / "blobs", file) ||
           (IsHex(hash, 64) && file == model.parent_path() / "blobs" / hash.substr(0, 2) / hash);
  }
  return false;
}

absl::StatusOr<std::string> ResolveInside(const std::string& root, const fs::path& path,
                                          const std::string& shown, const fs::path& snapshot = {}) {
  ISOBIT_ASSIGN_OR_RETURN(const fs::path canonical_root, Canonical(root, root));
  ISOBIT_ASSIGN_OR_RETURN(const fs::path canonical, Canonical(path, shown));
  if (!IsInside(canonical_root, canonical) && !IsBlobOfSnapshot(snapshot, canonical)) {
    return absl::InvalidArgumentError(absl::StrCat(shown, " leads outside ", root));
  }
  return canonical.string();
}

}  // namespace

absl::StatusOr<std::string> ResolveModelPath(const std::string& model_root,
                                             const std::string& requested) {
  const std::string shown =
      absl::StrCat("model path ", Quoted(requested), " (relative to --model_root)");
  if (requested.empty()) return absl::InvalidArgumentError("model path is empty");
  if (requested.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(shown, " contains a NUL byte"));
  }
  const fs::path relative(requested);
  if (relative.is_absolute()) {
    return absl::InvalidArgumentError(
        absl::StrCat(shown, " is absolute, expected a path relative to it"));
  }
  if (std::find(relative.begin(), relative.end(), "..") != relative.end()) {
    return absl::InvalidArgumentError(absl::StrCat(shown, " contains \"..\""));
  }
  ISOBIT_ASSIGN_OR_RETURN(std::string path,
                          ResolveInside(model_root, fs::path(model_root) / relative, shown));
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    return absl::InvalidArgumentError(absl::StrCat(shown, " is not a directory"));
  }
  return path;
}

absl::StatusOr<std::string> ResolveFileInside(const std::string& directory, const std::string& name,
                                              const std::string& root) {
  const std::string shown = absl::StrCat("file ", Quoted(name), " of ", directory);
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(shown, " is not a plain file name"));
  }
  ISOBIT_ASSIGN_OR_RETURN(const fs::path canonical, Canonical(directory, directory));
  return ResolveInside(root.empty() ? directory : root, fs::path(directory) / name, shown,
                       canonical);
}

}  // namespace isobit
