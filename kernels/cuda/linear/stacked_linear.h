// The linear layer of training, on row-major weights.
#ifndef ISOBIT_KERNELS_CUDA_LINEAR_STACKED_LINEAR_H_
#define ISOBIT_KERNELS_CUDA_LINEAR_STACKED_LINEAR_H_

#include "absl/status/status.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/product_schedule.h"
#include "kernels/training_ops.h"

namespace isobit::cuda {

// y = round(combine(leaves of x W^T) + bias), see StackedLinearArgs; all pointers are to GPU
// memory. Needs no workspace. Fast if x, ldx, the weights and their columns are multiples of 16
// bytes, the rows of every stacked matrix but the last are a multiple of 8, and the leaves' bounds
// multiples of 16; otherwise a slower kernel is used. INTERNAL: CUDA refused the launch.
absl::Status LaunchStackedLinear(const StackedLinearArgs& args, const Stream& stream);

// By tiles with a given schedule, whose split is 1, or by the slow kernel; for tests and tuning.
// INVALID_ARGUMENT: there is no such kernel for these arguments.
absl::Status LaunchStackedLinearAs(const ProductSchedule& schedule, const StackedLinearArgs& args,
                                   const Stream& stream);
absl::Status LaunchGeneralStackedLinear(const StackedLinearArgs& args, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LINEAR_STACKED_LINEAR_H_
