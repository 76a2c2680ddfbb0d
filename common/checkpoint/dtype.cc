// Bit-level conversions between bfloat16, binary16 and binary32.
#include "common/checkpoint/dtype.h"

#include <bit>
#include <cstring>

#include "common/base/check.h"

namespace isobit {
namespace {

// Checkpoint bytes carry no alignment promise, so every element is read through memcpy.
template <class T>
T Load(const void* source, size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(source) + index * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

const char* SafetensorsName(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return "BF16";
    case DType::kF16:
      return "F16";
    case DType::kF32:
      return "F32";
  }
  ISOBIT_CHECK(false) << "dtype " << static_cast<int>(dtype);
  return nullptr;
}

std::optional<DType> DTypeFromSafetensors(absl::string_view name) {
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    if (name == SafetensorsName(dtype)) return dtype;
  }
  return std::nullopt;
}

size_t ItemSize(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

uint16_t Bf16FromF32Bits(uint32_t bits) {
  constexpr uint32_t kInfinity = 0x7f800000;
  constexpr uint16_t kQuiet = 0x0040;
  if ((bits & 0x7fffffff) > kInfinity) return static_cast<uint16_t>(bits >> 16) | kQuiet;
  // Half of the last kept place, less one when that place is even: ties fall to the even side. A
  // carry out of the mantissa enters the exponent, which is the right result, up to infinity.
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

uint32_t F32BitsFromF16(uint16_t bits) {
  constexpr uint32_t kQuiet = 0x00400000;
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0x1f) {
    return sign | 0x7f800000 | (mantissa << 13) | (mantissa != 0 ? kQuiet : 0);
  }
  if (exponent != 0) return sign | ((exponent + 127 - 15) << 23) | (mantissa << 13);
  if (mantissa == 0) return sign;
  // Subnormal: mantissa * 2^-24. Its leading one becomes the implicit bit of a normal binary32.
  const int top = std::bit_width(mantissa) - 1;
  return sign | (static_cast<uint32_t>(top + 127 - 24) << 23) |
         ((mantissa << (23 - top)) & 0x7fffff);
}

void ConvertToBf16(DType dtype, const void* source, size_t count, uint16_t* out) {
  if (count == 0) return;
  switch (dtype) {
    case DType::kBf16:
      std::memcpy(out, source, count * sizeof(uint16_t));
      return;
    case DType::kF16:
      for (size_t i = 0; i < count; ++i) {
        out[i] = Bf16FromF32Bits(F32BitsFromF16(Load<uint16_t>(source, i)));
      }
      return;
    case DType::kF32:
      for (size_t i = 0; i < count; ++i) out[i] = Bf16FromF32Bits(Load<uint32_t>(source, i));
      return;
  }
}

void ConvertToFloat(DType dtype, const void* source, size_t count, float* out) {
  if (count == 0) return;
  switch (dtype) {
    case DType::kBf16:
      for (size_t i = 0; i < count; ++i) {
        out[i] = std::bit_cast<float>(static_cast<uint32_t>(Load<uint16_t>(source, i)) << 16);
      }
      return;
    case DType::kF16:
      for (size_t i = 0; i < count; ++i) {
        out[i] = std::bit_cast<float>(F32BitsFromF16(Load<uint16_t>(source, i)));
      }
      return;
    case DType::kF32:
      std::memcpy(out, source, count * sizeof(float));
      return;
  }
}

}  // namespace isobit
