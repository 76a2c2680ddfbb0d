// The weight gradient of a linear layer (NUMERICS.md, C11).
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_WEIGHT_GRADIENT_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_WEIGHT_GRADIENT_H_

#include <cstddef>

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/linear/product_schedule.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {

// Whether tiles can compute it: addresses and leading dimensions are multiples of 16 bytes, and the
// stacked matrices begin at multiples of eight rows.
bool HasWeightGradientTiles(const WeightGradientArgs& args);
// By tiles with a given schedule, or by the slow kernel; for tests and tuning. INVALID_ARGUMENT: it
// cannot compute these arguments.
absl::Status LaunchWeightGradientAs(const ProductSchedule& schedule, const WeightGradientArgs& args,
                                    std::byte* workspace, const Stream& stream);
size_t WorkspaceBytesAs(const Card& card, const ProductSchedule& schedule,
                        const WeightGradientArgs& args);
absl::Status LaunchGeneralWeightGradient(const WeightGradientArgs& args, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_WEIGHT_GRADIENT_H_
