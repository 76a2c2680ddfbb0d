// Tensor maps, by which the bulk copy engine finds a box of a row-major bf16 matrix.
#ifndef ISOBIT_KERNELS_CUDA_SM90_DEVICE_TENSOR_MAP_H_
#define ISOBIT_KERNELS_CUDA_SM90_DEVICE_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/contract/portable.h"

namespace isobit::cuda {

// Whether a matrix at `data` with leading dimension `ld` (elements) can have a tensor map: both are
// multiples of 16 bytes.
inline bool Mappable(const contract::Bf16* data, int64_t ld) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ld % 8 == 0 && ld > 0;
}

// A box may begin only at columns that are multiples of this, 16 bytes: for others an H200 raises
// an illegal instruction, which CUDA's documents do not mention. Rows may be any.
inline constexpr int kBoxStart = 8;

// A map of bf16 data [rows, columns], leading dimension ld, in boxes of box_rows x box_columns with
// the 128-byte swizzle (box_columns is 64) or the 64-byte one (32). Outside the matrix, reads give
// +0 and writes are dropped. INTERNAL: the driver failed.
absl::StatusOr<CUtensorMap> MapMatrix(const contract::Bf16* data, int64_t rows, int64_t columns,
                                      int64_t ld, int box_rows, int box_columns);

// A map of the heads of a tensor [rows, heads * head_dim], contiguous, in
// boxes of box_rows rows and 64 columns of one head, with the 128-byte
// swizzle. Columns after the head's last and rows after the tensor's last
// read as +0. head_dim is a multiple of 8. INTERNAL: the driver failed.
absl::StatusOr<CUtensorMap> MapHeads(const contract::Bf16* data, int64_t rows, int32_t heads,
                                     int32_t head_dim, int box_rows);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_DEVICE_TENSOR_MAP_H_
