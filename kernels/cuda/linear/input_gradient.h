// The input gradient of a linear layer (NUMERICS.md, C11).
#ifndef ISOBIT_KERNELS_CUDA_LINEAR_INPUT_GRADIENT_H_
#define ISOBIT_KERNELS_CUDA_LINEAR_INPUT_GRADIENT_H_

#include "absl/status/status.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/product_schedule.h"
#include "kernels/training_ops.h"

namespace isobit::cuda {

// dx = bf16(dy W), see InputGradientArgs; all pointers are to GPU memory. Needs no workspace. Fast
// if dy, lddy, dx, the weights and their columns are multiples of 16 bytes and the rows of every
// stacked matrix but the last are a multiple of 16; otherwise a slower kernel is used. INTERNAL:
// CUDA refused the launch.
absl::Status LaunchInputGradient(const InputGradientArgs& args, const Stream& stream);

// Whether the fast kernel can compute it.
bool HasInputGradientTiles(const InputGradientArgs& args);
// By tiles with a given schedule, or by the slow kernel; for tests and tuning. INVALID_ARGUMENT: it
// cannot compute these arguments.
absl::Status LaunchInputGradientAs(const ProductSchedule& schedule, const InputGradientArgs& args,
                                   const Stream& stream);
absl::Status LaunchGeneralInputGradient(const InputGradientArgs& args, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LINEAR_INPUT_GRADIENT_H_
