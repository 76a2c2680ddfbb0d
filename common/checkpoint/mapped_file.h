// A read-only memory map of a whole file.
#ifndef ISOBIT_COMMON_CHECKPOINT_MAPPED_FILE_H_
#define ISOBIT_COMMON_CHECKPOINT_MAPPED_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace isobit {

// Movable, not copyable. The file must not be shortened while it is mapped: replace checkpoint
// files by rename, as our writer does.
class MappedFile {
 public:
  // Errors: NOT_FOUND or what errno says; INVALID_ARGUMENT when `path` is not a regular file.
  static absl::StatusOr<MappedFile> Open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const uint8_t* data() const { return data_; }  // null when the file is empty
  size_t size() const { return size_; }          // bytes

 private:
  MappedFile(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  const uint8_t* data_;
  size_t size_;
};

// The contents of a text file. Errors: as MappedFile::Open; INVALID_ARGUMENT when it is longer than
// `max_bytes`.
absl::StatusOr<std::string> ReadTextFile(const std::string& path, size_t max_bytes);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_MAPPED_FILE_H_
