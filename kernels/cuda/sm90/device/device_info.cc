// Reads a device's properties and refuses what is not Hopper.
#include "kernels/cuda/sm90/device/device_info.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "common/cuda/cuda_status.h"

namespace isobit::cuda {

absl::StatusOr<DeviceInfo> GetDeviceInfo(int ordinal) {
  int count = 0;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaGetDeviceCount(&count));
  if (ordinal < 0 || ordinal >= count) {
    return absl::FailedPreconditionError(
        absl::StrCat("CUDA device ", ordinal, ": this machine has ", count));
  }
  cudaDeviceProp properties;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, ordinal));
  if (properties.major != 9 || properties.minor != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "CUDA device ", ordinal, " (", properties.name, ") has compute capability ",
        properties.major, ".", properties.minor, "; the kernels need 9.0 (H100, H200)"));
  }
  return DeviceInfo{ordinal, properties.name, properties.multiProcessorCount,
                    static_cast<size_t>(properties.l2CacheSize)};
}

}  // namespace isobit::cuda
