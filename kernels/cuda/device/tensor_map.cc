// See tensor_map.h.
#include "kernels/cuda/device/tensor_map.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/driver_function.h"

namespace isobit::cuda {

absl::StatusOr<CUtensorMap> MapMatrix(const contract::Bf16* data, int64_t rows, int64_t columns,
                                      int64_t ld, int box_rows, int box_columns) {
  static const auto encode =
      FindDriverFunction<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
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

}  // namespace isobit::cuda
