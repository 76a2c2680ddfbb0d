// Reads the safetensors file format, checking every field, and writes it. One file only;
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
  // The elements [first, first + count) of the tensor, or all of them.
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

// The bytes at the start of a safetensors file that describe its content. `source`: its name in
// errors. INVALID_ARGUMENT: the header is longer than 100 MB or than the file. Also ReadableFile's.
absl::StatusOr<std::string> ReadSafetensorsHead(const ReadableFile& file,
                                                const std::string& source);

// The tensors of a safetensors file of `file_bytes` bytes that begins with `head`, in order of
// their offsets. INVALID_ARGUMENT, naming file and tensor: the header is longer than 100 MB, the
// file or `head`, or is malformed; there are over 100000 tensors; a dtype is not BF16, F16 or F32;
// a dimension is negative or too large, or there are more than 8; offsets are reversed, outside the
// file, overlap, leave a gap or bytes at the end, or disagree with dtype and shape.
absl::StatusOr<std::vector<StoredTensor>> ParseSafetensors(absl::string_view head,
                                                           uint64_t file_bytes,
                                                           const std::string& source);

// Writes `tensors` to `path` atomically. The layout depends on the arguments alone: wider dtypes
// first (so that all are aligned), then by name. INVALID_ARGUMENT: a name is empty, repeated or
// "__metadata__", or size_bytes disagrees with dtype and shape.
absl::Status WriteSafetensors(const std::string& path, std::vector<Tensor> tensors,
                              const std::map<std::string, std::string>& metadata = {});

// The size of a tensor in bytes. INVALID_ARGUMENT: a dimension is negative, there are more than 8,
// or the product exceeds 2^62.
absl::StatusOr<size_t> TensorBytes(DType dtype, const std::vector<int64_t>& shape);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_SAFETENSORS_H_
