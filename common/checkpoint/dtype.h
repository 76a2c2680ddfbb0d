// Element types of checkpoint tensors and their exact conversion, by integer arithmetic alone: no
// rounding mode, compiler flag or CPU can change a loaded weight.
#ifndef ISOBIT_COMMON_CHECKPOINT_DTYPE_H_
#define ISOBIT_COMMON_CHECKPOINT_DTYPE_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace isobit {

enum class DType { kBf16, kF16, kF32 };

// "BF16", "F16", "F32": the names in a safetensors header.
const char* SafetensorsName(DType dtype);
std::optional<DType> DTypeFromSafetensors(absl::string_view name);

// Bytes of one element.
size_t ItemSize(DType dtype);

// IEEE binary32 bits -> bfloat16 bits, round to nearest even. A NaN stays a NaN of the same sign
// and becomes quiet.
uint16_t Bf16FromF32Bits(uint32_t bits);

// IEEE binary16 bits -> binary32 bits: exact, subnormals included. A NaN becomes quiet.
uint32_t F32BitsFromF16(uint16_t bits);

// Converts `count` elements at `source` (of type `dtype`, any alignment) to `out[count]`. To
// bfloat16: rounds to nearest even, once. To float: exact.
void ConvertToBf16(DType dtype, const void* source, size_t count, uint16_t* out);
void ConvertToFloat(DType dtype, const void* source, size_t count, float* out);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_DTYPE_H_
