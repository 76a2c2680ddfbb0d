// Copies a model with one bit changed. See flip_bit.h.
#include "tools/flip_bit.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/readable_file.h"
#include "common/checkpoint/safetensors.h"
#include "tools/random_model.h"

namespace isobit {
namespace {

namespace fs = std::filesystem;

absl::Status Failed(const std::error_code& error, const std::string& what) {
  return absl::ErrnoToStatus(error.value(), what);
}

// An element as bits and as a number.
std::string Describe(DType dtype, const uint8_t* element) {
  uint64_t bits = 0;
  std::memcpy(&bits, element, ItemSize(dtype));
  float value = 0;
  ConvertToFloat(dtype, element, 1, &value);
  return absl::StrFormat("0x%0*x (%.9g)", static_cast<int>(2 * ItemSize(dtype)), bits, value);
}

// Flips the bit in the safetensors file `path`. Returns what changed; nullopt: no such tensor
// there.
absl::StatusOr<std::optional<std::string>> FlipIn(const fs::path& path, const FlippedBit& what) {
  const std::string name = path.filename().string();
  ISOBIT_ASSIGN_OR_RETURN(const ReadableFile file, ReadableFile::Open(path.string(), name));
  ISOBIT_ASSIGN_OR_RETURN(const std::string head, ReadSafetensorsHead(file, name));
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<StoredTensor> tensors,
                          ParseSafetensors(head, file.size(), name));
  for (const auto& [tensor, offset] : tensors) {
    if (tensor.name != what.tensor) continue;
    const size_t item = ItemSize(tensor.dtype);
    if (what.index >= tensor.NumElements()) {
      return absl::InvalidArgumentError(absl::StrCat("index: expected at most ",
                                                     tensor.NumElements() - 1, " in ", tensor.name,
                                                     ", got ", what.index));
    }
    if (what.bit < 0 || static_cast<size_t>(what.bit) >= 8 * item) {
      return absl::InvalidArgumentError(absl::StrCat("bit: expected 0 to ", 8 * item - 1, " for ",
                                                     SafetensorsName(tensor.dtype), ", got ",
                                                     what.bit));
    }
    const uint64_t place = offset + what.index * item;
    uint8_t element[sizeof(float)];
    ISOBIT_RETURN_IF_ERROR(file.ReadAt(place, item, element));
    const std::string before = Describe(tensor.dtype, element);
    element[what.bit / 8] ^= static_cast<uint8_t>(1 << (what.bit % 8));
    std::fstream out(path, std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(static_cast<std::streamoff>(place));
    out.write(reinterpret_cast<const char*>(element), static_cast<std::streamsize>(item));
    if (!out.flush()) return absl::InternalError(absl::StrCat("cannot write ", path.string()));
    return absl::StrCat(what.tensor, "[", what.index, "] bit ", what.bit, ": ", before, " -> ",
                        Describe(tensor.dtype, element));
  }
  return std::nullopt;
}

// Copies `files` into the directory `to`, flips the bit there, and returns what changed.
absl::StatusOr<std::string> CopyAll(const std::vector<fs::path>& files, const FlippedBit& what,
                                    const std::string& to) {
  std::optional<std::string> said;
  for (const fs::path& path : files) {
    const fs::path copy = fs::path(to) / path.filename();
    std::error_code error;
    fs::copy_file(path, copy, error);
    if (error) return Failed(error, absl::StrCat("cannot copy ", path.string()));
    if (path.extension() != ".safetensors") continue;
    ISOBIT_ASSIGN_OR_RETURN(std::optional<std::string> flipped, FlipIn(copy, what));
    if (flipped) said = std::move(flipped);
  }
  if (said) return *said;
  return absl::NotFoundError(absl::StrCat("no file has a tensor ", what.tensor));
}

}  // namespace

absl::StatusOr<std::string> FlipBit(const std::string& from, const FlippedBit& what,
                                    const std::string& to) {
  std::error_code error;
  std::vector<fs::path> files;
  for (fs::directory_iterator it(from, error), end; !error && it != end; it.increment(error)) {
    if (it->is_regular_file(error)) files.push_back(it->path());
  }
  if (error) return Failed(error, absl::StrCat("cannot read ", from));
  ISOBIT_RETURN_IF_ERROR(CreateEmptyDirectory(to));
  absl::StatusOr<std::string> said = CopyAll(files, what, to);
  if (!said.ok()) fs::remove_all(to, error);
  return said;
}

}  // namespace isobit
