// Reading. A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape,
// data_offsets}}, then the data.
#include "common/checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/strict_json.h"

static_assert(std::endian::native == std::endian::little, "safetensors data is little endian");

namespace isobit {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr size_t kMaxTensors = 100'000;
constexpr size_t kMaxDimensions = 8;
constexpr size_t kMaxNameBytes = 512;

absl::StatusOr<uint64_t> ParseUnsigned(const nlohmann::json& value, absl::string_view what) {
  if (value.is_number_unsigned()) return value.get<uint64_t>();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " must be a non-negative integer, got ", value.dump().substr(0, 40)));
}

absl::StatusOr<const nlohmann::json*> Field(const nlohmann::json& entry, const char* name) {
  const auto it = entry.find(name);
  if (it == entry.end()) return absl::InvalidArgumentError(absl::StrCat("lacks ", name));
  return &*it;
}

absl::StatusOr<DType> ParseDType(const nlohmann::json& entry) {
  ISOBIT_ASSIGN_OR_RETURN(const nlohmann::json* field, Field(entry, "dtype"));
  if (!field->is_string()) return absl::InvalidArgumentError("dtype must be a string");
  const std::string& name = field->get_ref<const std::string&>();
  if (const std::optional<DType> dtype = DTypeFromSafetensors(name)) return *dtype;
  return absl::InvalidArgumentError(
      absl::StrCat("dtype ", Quoted(name), " is not supported, expected BF16, F16 or F32"));
}

absl::StatusOr<std::vector<int64_t>> ParseShape(const nlohmann::json& entry) {
  ISOBIT_ASSIGN_OR_RETURN(const nlohmann::json* field, Field(entry, "shape"));
  if (!field->is_array()) return absl::InvalidArgumentError("shape must be an array");
  if (field->size() > kMaxDimensions) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape has ", field->size(), " dimensions, limit ", kMaxDimensions));
  }
  std::vector<int64_t> shape;
  for (const nlohmann::json& dimension : *field) {
    ISOBIT_ASSIGN_OR_RETURN(const uint64_t extent, ParseUnsigned(dimension, "a dimension"));
    if (extent > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return absl::InvalidArgumentError(absl::StrCat("dimension ", extent, " is too large"));
    }
    shape.push_back(static_cast<int64_t>(extent));
  }
  return shape;
}

// One entry of the header, with the offset in the data section, whose length is `size`.
absl::StatusOr<StoredTensor> ParseEntry(const std::string& name, const nlohmann::json& entry,
                                        uint64_t size) {
  if (!entry.is_object()) return absl::InvalidArgumentError("its header entry is not an object");
  for (const auto& [key, value] : entry.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      return absl::InvalidArgumentError(absl::StrCat("unknown header field ", Quoted(key)));
    }
  }
  Tensor tensor;
  tensor.name = name;
  ISOBIT_ASSIGN_OR_RETURN(tensor.dtype, ParseDType(entry));
  ISOBIT_ASSIGN_OR_RETURN(tensor.shape, ParseShape(entry));
  ISOBIT_ASSIGN_OR_RETURN(tensor.size_bytes, TensorBytes(tensor.dtype, tensor.shape));

  ISOBIT_ASSIGN_OR_RETURN(const nlohmann::json* offsets, Field(entry, "data_offsets"));
  if (!offsets->is_array() || offsets->size() != 2) {
    return absl::InvalidArgumentError("data_offsets must be an array of two integers");
  }
  ISOBIT_ASSIGN_OR_RETURN(const uint64_t begin, ParseUnsigned((*offsets)[0], "data_offsets[0]"));
  ISOBIT_ASSIGN_OR_RETURN(const uint64_t end, ParseUnsigned((*offsets)[1], "data_offsets[1]"));
  if (begin > end) {
    return absl::InvalidArgumentError(
        absl::StrCat("data_offsets are reversed: [", begin, ", ", end, "]"));
  }
  if (end > size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ends at byte ", end, " of the data, but the file holds ", size, " (truncated?)"));
  }
  if (end - begin != tensor.size_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data_offsets span ", end - begin, " bytes, but ", SafetensorsName(tensor.dtype), " ",
        ShapeString(tensor.shape), " needs ", tensor.size_bytes));
  }
  return StoredTensor{std::move(tensor), begin};
}

// Sorts by offset and requires that the tensors tile the `size` bytes of the data section exactly.
absl::Status SortAndCheckTiling(uint64_t size, const std::string& source,
                                std::vector<StoredTensor>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.tensor.size_bytes < b.tensor.size_bytes;
  });
  uint64_t expected = 0;
  for (const StoredTensor& stored : tensors) {
    if (stored.offset != expected) {
      const bool overlaps = stored.offset < expected;
      return absl::InvalidArgumentError(absl::StrCat(
          source, ": tensor ", Quoted(stored.tensor.name), ": begins at byte ", stored.offset,
          " of the data, expected ", expected, overlaps ? " (overlap)" : " (gap)"));
    }
    expected += stored.tensor.size_bytes;
  }
  if (expected == size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(source, ": ", size - expected,
                                                 " bytes at the end belong to no tensor (data has ",
                                                 size, ", tensors end at ", expected, ")"));
}

absl::Status CheckMetadata(const nlohmann::json& metadata, const std::string& source) {
  bool valid = metadata.is_object();
  if (valid) {
    for (const nlohmann::json& value : metadata) valid = valid && value.is_string();
  }
  if (valid) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(source, ": __metadata__ must map strings to strings"));
}

// How long the head of a file is. `length`: its first 8 bytes, or all if there are fewer.
absl::StatusOr<size_t> SafetensorsHeadBytes(absl::string_view length, uint64_t file_bytes,
                                            const std::string& source) {
  if (length.size() < kLengthBytes || file_bytes < kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        source, ": ", file_bytes, " bytes, too short for a safetensors header length"));
  }
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    header_bytes |= uint64_t{static_cast<uint8_t>(length[i])} << (8 * i);
  }
  if (header_bytes > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": header length ", header_bytes,
                                                   " is over the limit ", kMaxHeaderBytes));
  }
  if (header_bytes > file_bytes - kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": header length ", header_bytes,
                                                   ", but only ", file_bytes - kLengthBytes,
                                                   " bytes follow (truncated?)"));
  }
  return kLengthBytes + header_bytes;
}

}  // namespace

std::string ShapeString(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<size_t> TensorBytes(DType dtype, const std::vector<int64_t>& shape) {
  constexpr uint64_t kMaxBytes = uint64_t{1} << 62;
  if (shape.size() > kMaxDimensions) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape has ", shape.size(), " dimensions, limit ", kMaxDimensions));
  }
  uint64_t bytes = ItemSize(dtype);
  for (const int64_t extent : shape) {
    if (extent < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape ", ShapeString(shape), " has a negative dimension"));
    }
    if (extent != 0 && bytes > kMaxBytes / static_cast<uint64_t>(extent)) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape ", ShapeString(shape), " needs more than 2^62 bytes"));
    }
    bytes *= static_cast<uint64_t>(extent);
  }
  return bytes;
}

absl::StatusOr<std::string> ReadSafetensorsHead(const ReadableFile& file,
                                                const std::string& source) {
  std::string head(std::min<uint64_t>(kLengthBytes, file.size()), '\0');
  ISOBIT_RETURN_IF_ERROR(file.ReadAt(0, head.size(), head.data()));
  ISOBIT_ASSIGN_OR_RETURN(const size_t bytes, SafetensorsHeadBytes(head, file.size(), source));
  const size_t known = head.size();
  head.resize(bytes);
  ISOBIT_RETURN_IF_ERROR(file.ReadAt(known, bytes - known, head.data() + known));
  return head;
}

absl::StatusOr<std::vector<StoredTensor>> ParseSafetensors(absl::string_view head,
                                                           uint64_t file_bytes,
                                                           const std::string& source) {
  ISOBIT_ASSIGN_OR_RETURN(const size_t head_bytes,
                          SafetensorsHeadBytes(head.substr(0, kLengthBytes), file_bytes, source));
  if (head.size() < head_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": a head of ", head.size(), " bytes, expected ", head_bytes));
  }
  const absl::string_view text = head.substr(kLengthBytes, head_bytes - kLengthBytes);
  ISOBIT_ASSIGN_OR_RETURN(const nlohmann::json header, ParseJsonObject(text, source + ": header"));
  if (header.size() > kMaxTensors) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": ", header.size(), " tensors, limit ", kMaxTensors));
  }

  const uint64_t data_bytes = file_bytes - head_bytes;
  std::vector<StoredTensor> tensors;
  tensors.reserve(header.size());
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      ISOBIT_RETURN_IF_ERROR(CheckMetadata(entry, source));
      continue;
    }
    absl::StatusOr<StoredTensor> tensor =
        name.empty() || name.size() > kMaxNameBytes
            ? absl::InvalidArgumentError(
                  absl::StrCat("name has ", name.size(), " bytes, expected 1 to ", kMaxNameBytes))
            : ParseEntry(name, entry, data_bytes);
    if (!tensor.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(source, ": tensor ", Quoted(name), ": ", tensor.status().message()));
    }
    tensors.push_back(*std::move(tensor));
  }
  ISOBIT_RETURN_IF_ERROR(SortAndCheckTiling(data_bytes, source, tensors));
  for (StoredTensor& stored : tensors) stored.offset += head_bytes;
  return tensors;
}

}  // namespace isobit
