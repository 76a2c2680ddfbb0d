// Copies a model with one bit changed. See flip_bit.h.
#include "tools/flip_bit.h"

#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/atomic_file.h"
#include "common/checkpoint/mapped_file.h"
#include "common/checkpoint/safetensors.h"
#include "tools/random_model.h"

namespace isobit {
namespace {

namespace fs = std::filesystem;

absl::Status Failed(const std::error_code& error, const std::string& what) {
  return absl::ErrnoToStatus(error.value(), what);
}

// The element before or after the flip, as its bits and as a number.
std::string Describe(DType dtype, const uint8_t* element) {
  uint64_t bits = 0;
  std::memcpy(&bits, element, ItemSize(dtype));
  float value = 0;
  ConvertToFloat(dtype, element, 1, &value);
  return absl::StrFormat("0x%0*x (%.9g)", static_cast<int>(2 * ItemSize(dtype)), bits, value);
}

// Writes `path` to `copy` with the bit flipped and says so; nullopt if the tensor is not in it.
absl::StatusOr<std::optional<std::string>> CopyFlipped(const fs::path& path, const FlippedBit& what,
                                                       const fs::path& copy) {
  ISOBIT_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path.string()));
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<Tensor> tensors,
                          ParseSafetensors(file.data(), file.size(), path.filename().string()));
  for (const Tensor& tensor : tensors) {
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
    const uint8_t* element = tensor.data + what.index * item;
    std::string changed(reinterpret_cast<const char*>(element), item);
    changed[static_cast<size_t>(what.bit) / 8] ^= static_cast<char>(1 << (what.bit % 8));
    const size_t offset = static_cast<size_t>(element - file.data());
    const absl::string_view bytes(reinterpret_cast<const char*>(file.data()), file.size());
    ISOBIT_RETURN_IF_ERROR(WriteFileAtomically(
        copy.string(), {bytes.substr(0, offset), changed, bytes.substr(offset + item)}));
    return absl::StrCat(what.tensor, "[", what.index, "] bit ", what.bit, ": ",
                        Describe(tensor.dtype, element), " -> ",
                        Describe(tensor.dtype, reinterpret_cast<const uint8_t*>(changed.data())));
  }
  return std::nullopt;
}

// Copies `files` into the directory `to` and says what was flipped.
absl::StatusOr<std::string> CopyAll(const std::vector<fs::path>& files, const FlippedBit& what,
                                    const std::string& to) {
  std::optional<std::string> said;
  for (const fs::path& path : files) {
    const fs::path copy = fs::path(to) / path.filename();
    if (path.extension() == ".safetensors") {
      ISOBIT_ASSIGN_OR_RETURN(std::optional<std::string> flipped, CopyFlipped(path, what, copy));
      if (flipped) {
        said = std::move(flipped);
        continue;
      }
    }
    std::error_code error;
    fs::copy_file(path, copy, error);
    if (error) return Failed(error, absl::StrCat("cannot copy ", path.string()));
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
