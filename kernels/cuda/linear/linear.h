// The linear layer on a GPU: a common entry point for the schedules that compute it.
#ifndef ISOBIT_KERNELS_CUDA_LINEAR_LINEAR_H_
#define ISOBIT_KERNELS_CUDA_LINEAR_LINEAR_H_

#include "absl/status/status.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/schedule.h"
#include "kernels/ops.h"

namespace isobit::cuda {

// y = round(combine(leaves of x W^T) + bias), see LinearArgs. All pointers are to GPU memory, and
// weight.packed has PackLinear's layout, at a multiple of 128 bytes. Needs no workspace. Ignores
// args.mode: the leaves are the contract's. Fast if x and ldx are multiples of 16 bytes; otherwise
// a slower kernel is used. If m or n is 0, launches nothing. INTERNAL: CUDA refused the launch.
absl::Status LaunchLinear(const LinearArgs& args, const Stream& stream);

// The same with a given schedule, for tests and tuning. INVALID_ARGUMENT: the schedule cannot
// compute these arguments (CheckSchedule).
absl::Status LaunchLinearAs(const LinearSchedule& schedule, const LinearArgs& args,
                            const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LINEAR_LINEAR_H_
