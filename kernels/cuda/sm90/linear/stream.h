// The launcher of the linear layer for few rows of x (stream.cuh).
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_STREAM_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_STREAM_H_

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/linear/schedule.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {

// LaunchLinear by a schedule that CheckSchedule accepts. INTERNAL: CUDA refused the launch.
absl::Status LaunchLinearStream(const StreamSchedule& schedule, const LinearArgs& args,
                                const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_STREAM_H_
