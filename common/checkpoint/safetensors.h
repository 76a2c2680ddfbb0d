// The safetensors file format: reading with every field checked, and writing. One file;
// checkpoint.h joins the shards of a model.
#ifndef ISOBIT_COMMON_CHECKPOINT_SAFETENSORS_H_
#define ISOBIT_COMMON_CHECKPOINT_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/dtype.h"
#include "common/checkpoint/readable_file.h"

namespace isobit {

// A named array in row-major order. Does not own its bytes.
struct Tensor {
  std::string name;
  DType dtype = DType::kBf16;
  std::vector<int64_t> shape;     // outermost first; empty for a scalar
  const uint8_t* data = nullptr;  // little endian, of any alignment; null: not in memory
  size_t size_bytes = 0;          // product of shape * ItemSize(dtype)

  size_t NumElements() const { return size_bytes / ItemSize(dtype); }
  // Elements [first, first + count), or all.
  void ToBf16(size_t first, size_t count, uint16_t* out) const {
    ConvertToBf16(dtype, data + first * ItemSize(dtype), count, out);
  }
  void ToBf16(uint16_t* out) const { ToBf16(0, NumElements(), out); }
  void ToFloat(float* out) const { ConvertToFloat(dtype, data, NumElements(), out); }
};

// "[3, 5]".
std::string ShapeString(const std::vector<int64_t>& shape);

// A tensor, without data, and where its bytes begin in the file.
struct StoredTensor {
  Tensor tensor;
  uint64_t offset = 0;
};

// The bytes at the start of a safetensors file that tell what is in it. `source` names the file in
// errors. INVALID_ARGUMENT: a header longer than 100 MB or than the file; else ReadableFile's.
absl::StatusOr<std::string> ReadSafetensorsHead(const ReadableFile& file,
                                                const std::string& source);

// The tensors of a safetensors file of `file_bytes` bytes that begins with `head`, in order of
// their offsets. INVALID_ARGUMENT, naming file and tensor: a header longer than 100 MB, than the
// file or than `head`; malformed header; more than 100000 tensors; dtype other than BF16, F16, F32;
// negative, oversized or more than 8 dimensions; offsets that are reversed, outside the file,
// overlap, leave a gap or bytes at the end, or disagree with dtype and shape.
absl::StatusOr<std::vector<StoredTensor>> ParseSafetensors(absl::string_view head,
                                                           uint64_t file_bytes,
                                                           const std::string& source);

// Writes `tensors` to `path` atomically. Layout is a function of the arguments alone: wider dtypes
// first (so that all are aligned), then by name. INVALID_ARGUMENT: duplicate or empty name, name
// "__metadata__", or size_bytes that disagrees with dtype and shape.
absl::Status WriteSafetensors(const std::string& path, std::vector<Tensor> tensors,
                              const std::map<std::string, std::string>& metadata = {});

// The number of bytes of a tensor. INVALID_ARGUMENT: a negative dimension, more than 8 of them, or
// a product over 2^62.
absl::StatusOr<size_t> TensorBytes(DType dtype, const std::vector<int64_t>& shape);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_SAFETENSORS_H_
