// The GPUs of this machine, and whether the kernels run on them.
#ifndef ISOBIT_KERNELS_CUDA_SM90_DEVICE_DEVICE_INFO_H_
#define ISOBIT_KERNELS_CUDA_SM90_DEVICE_DEVICE_INFO_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace isobit::cuda {

struct DeviceInfo {
  int ordinal = 0;
  std::string name;
  int num_sms = 0;
  size_t l2_bytes = 0;
};

// Information about a device. FAILED_PRECONDITION: there is no driver or no such device, or its
// compute capability is not 9.0 (the kernels' machine code is sm_90a, and the contract's arithmetic
// is Hopper's).
absl::StatusOr<DeviceInfo> GetDeviceInfo(int ordinal);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_DEVICE_DEVICE_INFO_H_
