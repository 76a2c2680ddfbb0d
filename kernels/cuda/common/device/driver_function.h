// Functions of the CUDA driver, found at run time, so that nothing links libcuda.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_DRIVER_FUNCTION_H_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_DRIVER_FUNCTION_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/cuda/cuda_status.h"

namespace isobit::cuda {

// The driver's function `name`, as of CUDA 12.0, such as
// FindDriverFunction<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled").
// FAILED_PRECONDITION: the driver does not have it, or there is no driver. INTERNAL: CUDA refused.
template <typename Function>
absl::StatusOr<Function> FindDriverFunction(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess) {
    return CudaStatus(error, absl::StrCat("cudaGetDriverEntryPointByVersion of ", name));
  }
  if (function == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("the CUDA driver has no ", name));
  }
  return reinterpret_cast<Function>(function);
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_DRIVER_FUNCTION_H_
