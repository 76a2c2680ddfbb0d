// The linear layer of training, on row-major weights.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_STACKED_LINEAR_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_STACKED_LINEAR_H_

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/linear/product_schedule.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {

// StackedLinear (kernels/cuda/common/device/ops.h) by tiles with a given schedule, whose split is
// 1, or by the slow kernel; for tests and tuning. INVALID_ARGUMENT: there is no such kernel for
// these arguments.
absl::Status LaunchStackedLinearAs(const ProductSchedule& schedule, const StackedLinearArgs& args,
                                   const Stream& stream);
absl::Status LaunchGeneralStackedLinear(const StackedLinearArgs& args, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_STACKED_LINEAR_H_
