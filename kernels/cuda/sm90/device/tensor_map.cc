// Encodes tensor maps by the driver's function, which is looked up at run time.
#include "kernels/cuda/sm90/device/tensor_map.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/device/driver_function.h"

namespace isobit::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

absl::StatusOr<Encode> FindEncode() {
  static const auto encode = FindDriverFunction<Encode>("cuTensorMapEncodeTiled");
  return encode;
}

}  // namespace

absl::StatusOr<CUtensorMap> MapMatrix(const contract::Bf16* data, int64_t rows, int64_t columns,
                                      int64_t ld, int box_rows, int box_columns) {
  const absl::StatusOr<Encode> encode = FindEncode();
  if (!encode.ok()) return encode.status();
  CUtensorMap map;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(ld) * sizeof(contract::Bf16)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns),
                            static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[] = {1, 1};
  const CUresult result =
      (*encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<contract::Bf16*>(data), sizes,
                strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return absl::InternalError(absl::StrCat("cuTensorMapEncodeTiled: error ", result, " for ", rows,
                                            " x ", columns, ", leading dimension ", ld, ", box ",
                                            box_rows, " x ", box_columns));
  }
  return map;
}

absl::StatusOr<CUtensorMap> MapHeads(const contract::Bf16* data, int64_t rows, int32_t heads,
                                     int32_t head_dim, int box_rows) {
  const absl::StatusOr<Encode> encode = FindEncode();
  if (!encode.ok()) return encode.status();
  CUtensorMap map;
  const auto row_bytes = static_cast<cuuint64_t>(head_dim) * sizeof(contract::Bf16);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {row_bytes, row_bytes * static_cast<cuuint64_t>(heads)};
  const cuuint32_t box[] = {64, 1, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[] = {1, 1, 1};
  const CUresult result = (*encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<contract::Bf16*>(data), sizes, strides,
      box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return absl::InternalError(absl::StrCat("cuTensorMapEncodeTiled: error ", result, " for ", rows,
                                            " rows of ", heads, " heads of ", head_dim,
                                            ", boxes of ", box_rows, " rows"));
  }
  return map;
}

}  // namespace isobit::cuda
