// The safetensors file format: reading with every field checked, and writing. One file;
// checkpoint.h joins the shards of a model.
#ifndef ISOBIT_COMMON_CHECKPOINT_SAFETENSORS_H_
#define ISOBIT_COMMON_CHECKPOINT_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/dtype.h"

namespace isobit {

// A named array in row-major order. Does not own its bytes.
struct Tensor {
  std::string name;
  DType dtype = DType::kBf16;
  std::vector<int64_t> shape;     // outermost first; empty for a scalar
  const uint8_t* data = nullptr;  // little endian; a file may leave it unaligned
  size_t size_bytes = 0;          // product of shape * ItemSize(dtype)
  // Makes the elements [first, first + count) of a bf16 tensor that is nowhere stored: `data` is
  // then null, and only the calls below reach the elements. Thread safe. Null for a stored tensor.
  std::function<void(size_t first, size_t count, uint16_t* out)> generate = nullptr;

  size_t NumElements() const { return size_bytes / ItemSize(dtype); }
  // Elements [first, first + count), or all.
  void ToBf16(size_t first, size_t count, uint16_t* out) const;
  void ToBf16(uint16_t* out) const { ToBf16(0, NumElements(), out); }
  // Of a stored tensor.
  void ToFloat(float* out) const { ConvertToFloat(dtype, data, NumElements(), out); }
};

// "[3, 5]".
std::string ShapeString(const std::vector<int64_t>& shape);

// SHA-256 (64 hex digits) of dtype, shape and raw bytes of a stored tensor; the name is not part of
// it.
std::string TensorDigest(const Tensor& tensor);

// The tensors of a safetensors file whose bytes are `data[size]`, in order of their offsets; they
// point into `data`. `source` names the file in errors. INVALID_ARGUMENT, naming file and tensor:
// header longer than 100 MB or than the file; malformed header; more than 100000 tensors; dtype
// other than BF16, F16, F32; negative, oversized or more than 8 dimensions; offsets that are
// reversed, outside the file, overlap, leave a gap or bytes at the end, or disagree with dtype and
// shape.
absl::StatusOr<std::vector<Tensor>> ParseSafetensors(const uint8_t* data, size_t size,
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
