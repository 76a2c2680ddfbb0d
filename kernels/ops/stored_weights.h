// Weights as a trainer or a checkpoint stores them, before packing: rounding to bf16, and the sums
// of the weight digest (docs/API.md, "The weight digest"), with the first value that is not finite;
// on host and device. They equal ConvertToBf16 and TensorDigester of common/checkpoint, which no
// backend may include.
#ifndef ISOBIT_KERNELS_OPS_STORED_WEIGHTS_H_
#define ISOBIT_KERNELS_OPS_STORED_WEIGHTS_H_

#include <cstdint>

#include "kernels/contract/portable.h"

namespace isobit {

// How values are stored before they are rounded to bf16.
enum class StoredAs { kBf16, kF16, kF32 };

// A slice of a matrix, in memory that its reader can access.
struct StoredMatrix {
  const void* values = nullptr;  // row after row
  StoredAs stored_as = StoredAs::kBf16;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;  // values from one row to the next
};

// Where a slice lies in its tensor; a vector is a matrix of one column.
struct PartOfTensor {
  int64_t first_row = 0;
  int64_t first_column = 0;
  int64_t tensor_columns = 1;
};

// The bf16 bits of an fp32 value, rounded to nearest, ties to even; a NaN keeps its sign and
// becomes quiet.
ISOBIT_HD contract::Bf16 RoundedWeight(uint32_t bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<contract::Bf16>(bits >> 16) | 0x0040;
  return static_cast<contract::Bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The bits of the fp32 value that equals a binary16 value.
ISOBIT_HD uint32_t WidenedHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 0x1f;
  uint32_t mantissa = half & 0x3ff;
  if (exponent == 0x1f) {
    return sign | 0x7f800000 | (mantissa << 13) | (mantissa != 0 ? 0x00400000 : 0);
  }
  if (exponent != 0) return sign | ((exponent + 112) << 23) | (mantissa << 13);
  if (mantissa == 0) return sign;
  uint32_t shifts = 0;  // until the leading one becomes the implicit bit
  for (; (mantissa & 0x400) == 0; mantissa <<= 1) ++shifts;
  return sign | ((113 - shifts) << 23) | ((mantissa & 0x3ff) << 13);
}

template <StoredAs kStoredAs>
ISOBIT_HD contract::Bf16 LoadWeight(const void* values, int64_t index) {
  if constexpr (kStoredAs == StoredAs::kF32) {
    return RoundedWeight(static_cast<const uint32_t*>(values)[index]);
  } else {
    const uint16_t bits = static_cast<const uint16_t*>(values)[index];
    return kStoredAs == StoredAs::kBf16 ? bits : RoundedWeight(WidenedHalf(bits));
  }
}

// What is kept about a tensor: the two sums of its digest, and ~i for the row-major index i of its
// first value that is not finite in bf16, or 0 if there is none.
inline constexpr int kWeightSums = 3;

// Whether one of a word's four values is a NaN or an infinity: if the exponent is all ones, adding
// one to its last place carries into the sign.
ISOBIT_HD bool HasNonfinite(uint64_t word) {
  return (((word & 0x7f807f807f807f80) + 0x0080008000800080) & 0x8000800080008000) != 0;
}

// ~i of the word's first value that is not finite; `column` is that of the word's first value.
ISOBIT_HD uint64_t NonfinitePlace(uint64_t word, const PartOfTensor& part, int64_t row,
                                  int64_t column) {
  int v = 0;
  while (((word >> (16 * v)) & 0x7f80) != 0x7f80) ++v;
  return ~static_cast<uint64_t>((part.first_row + row) * part.tensor_columns + part.first_column +
                                column + v);
}

// The index of a word, which is four values of a row, in its tensor. `column` is a multiple of 4.
ISOBIT_HD uint64_t WordIndex(const PartOfTensor& part, int64_t row, int64_t column) {
  return static_cast<uint64_t>((part.first_row + row) * ((part.tensor_columns + 3) / 4) +
                               (part.first_column + column) / 4);
}

// Adds a word to the sums of its tensor.
ISOBIT_HD void AddWeightWord(uint64_t word, uint64_t index, uint64_t& first, uint64_t& second) {
  uint64_t mixed = word ^ ((index + 1) * 0x9e3779b97f4a7c15);
  mixed ^= mixed >> 32;
  mixed *= 0xbf58476d1ce4e5b9;
  mixed ^= mixed >> 32;
  const uint64_t a = mixed * 0x94d049bb133111eb;
  const uint64_t b = mixed * 0xff51afd7ed558ccd;
  first += a ^ (a >> 32);
  second += b ^ (b >> 32);
}

template <StoredAs kStoredAs>
void AddWeightSums(const StoredMatrix& from, const PartOfTensor& part, uint64_t* sums) {
  for (int64_t row = 0; row < from.rows; ++row) {
    for (int64_t column = 0; column < from.columns; column += 4) {
      uint64_t word = 0;
      for (int64_t v = 0; v < 4 && column + v < from.columns; ++v) {
        word |= uint64_t{LoadWeight<kStoredAs>(from.values, row * from.stride + column + v)}
                << (16 * v);
      }
      AddWeightWord(word, WordIndex(part, row, column), sums[0], sums[1]);
      if (HasNonfinite(word)) {
        const uint64_t place = NonfinitePlace(word, part, row, column);
        if (place > sums[2]) sums[2] = place;
      }
    }
  }
}

// On the host: adds the sums of a slice of a tensor to those of its other slices, [kWeightSums].
inline void AddWeightSums(const StoredMatrix& from, const PartOfTensor& part, uint64_t* sums) {
  switch (from.stored_as) {
    case StoredAs::kBf16:
      return AddWeightSums<StoredAs::kBf16>(from, part, sums);
    case StoredAs::kF16:
      return AddWeightSums<StoredAs::kF16>(from, part, sums);
    case StoredAs::kF32:
      return AddWeightSums<StoredAs::kF32>(from, part, sums);
  }
}

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_STORED_WEIGHTS_H_
