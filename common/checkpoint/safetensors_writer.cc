// Writing of safetensors files.
#include <algorithm>
#include <cstdint>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/atomic_file.h"
#include "common/checkpoint/safetensors.h"
#include "common/checkpoint/strict_json.h"

namespace isobit {
namespace {

absl::Status CheckTensors(const std::vector<Tensor>& tensors) {
  std::set<absl::string_view> names;
  for (const Tensor& tensor : tensors) {
    if (tensor.name.empty() || tensor.name == "__metadata__") {
      return absl::InvalidArgumentError(absl::StrCat(Quoted(tensor.name), " cannot name a tensor"));
    }
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", Quoted(tensor.name), " is given twice"));
    }
    ISOBIT_ASSIGN_OR_RETURN(const size_t bytes, TensorBytes(tensor.dtype, tensor.shape));
    if (bytes != tensor.size_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", Quoted(tensor.name), " has ", tensor.size_bytes, " bytes, but ",
          SafetensorsName(tensor.dtype), " ", ShapeString(tensor.shape), " needs ", bytes));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteSafetensors(const std::string& path, std::vector<Tensor> tensors,
                              const std::map<std::string, std::string>& metadata) {
  ISOBIT_RETURN_IF_ERROR(CheckTensors(tensors));
  std::sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    if (ItemSize(a.dtype) != ItemSize(b.dtype)) return ItemSize(a.dtype) > ItemSize(b.dtype);
    return a.name < b.name;
  });

  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const Tensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", SafetensorsName(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.size_bytes}}};
    offset += tensor.size_bytes;
  }
  // Bytes of a name that are not UTF-8 are replaced instead of thrown on; such a tensor could not
  // be found by its name anyway.
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');  // keeps the data 8-byte aligned in a memory map

  std::string length(8, '\0');
  for (size_t i = 0; i < length.size(); ++i) {
    length[i] = static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i));
  }
  std::vector<absl::string_view> pieces = {length, text};
  for (const Tensor& tensor : tensors) {
    pieces.emplace_back(reinterpret_cast<const char*>(tensor.data), tensor.size_bytes);
  }
  return WriteFileAtomically(path, pieces);
}

}  // namespace isobit
