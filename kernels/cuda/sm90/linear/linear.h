// The linear layer on a GPU: a common entry point for the schedules that compute it.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_LINEAR_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_LINEAR_H_

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/linear/schedule.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {

// Linear (kernels/cuda/common/device/ops.h) with a given schedule, for tests and tuning.
// INVALID_ARGUMENT: the schedule cannot compute these arguments (CheckSchedule).
absl::Status LaunchLinearAs(const LinearSchedule& schedule, const LinearArgs& args,
                            const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_LINEAR_H_
