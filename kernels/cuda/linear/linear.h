// The linear layer on a GPU: one front end over the schedules that compute it.
#ifndef ISOBIT_KERNELS_CUDA_LINEAR_LINEAR_H_
#define ISOBIT_KERNELS_CUDA_LINEAR_LINEAR_H_

#include "absl/status/status.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/schedule.h"
#include "kernels/ops.h"

namespace isobit::cuda {

// y = round(combine(leaves of x W^T) + bias), see LinearArgs; all pointers are to GPU memory and
// weight.packed has PackLinear's layout, at a multiple of 128 bytes. Needs no workspace. args.mode
// is ignored: the leaves are the contract's. Fast if x and ldx are multiples of 16 bytes; a slower
// kernel serves any other alignment. If m or n is 0, nothing is launched. INTERNAL: CUDA refused.
absl::Status LaunchLinear(const LinearArgs& args, const Stream& stream);

// The same with a given schedule, for tests and tuning. INVALID_ARGUMENT: the schedule cannot
// compute these arguments (CheckSchedule).
absl::Status LaunchLinearAs(const LinearSchedule& schedule, const LinearArgs& args,
                            const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LINEAR_LINEAR_H_
