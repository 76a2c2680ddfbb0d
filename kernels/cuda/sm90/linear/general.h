// The linear layer for shapes and alignments that no other kernel supports.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_GENERAL_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_GENERAL_H_

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {

// LaunchLinear for any arguments. INTERNAL: CUDA refused the launch.
absl::Status LaunchLinearGeneral(const LinearArgs& args, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_GENERAL_H_
