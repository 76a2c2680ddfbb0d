// The input gradient of a linear layer (NUMERICS.md, C11).
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_INPUT_GRADIENT_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_INPUT_GRADIENT_H_

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/linear/product_schedule.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {

// Whether the fast kernel can compute it.
bool HasInputGradientTiles(const InputGradientArgs& args);
// By tiles with a given schedule, or by the slow kernel; for tests and tuning. INVALID_ARGUMENT: it
// cannot compute these arguments.
absl::Status LaunchInputGradientAs(const ProductSchedule& schedule, const InputGradientArgs& args,
                                   const Stream& stream);
absl::Status LaunchGeneralInputGradient(const InputGradientArgs& args, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_INPUT_GRADIENT_H_
