// The expected time of a tile schedule: a model fitted to measurements, used to choose a layer's
// schedule. It affects no bit.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_COST_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_COST_H_

#include <cstdint>

#include "kernels/cuda/common/device/card.h"
#include "kernels/cuda/sm90/linear/tile_table.h"
#include "kernels/ops/linear_shape.h"

namespace isobit::cuda {

// Microseconds for m rows; infinite for a tile that was not measured. push_us: the time that pushed
// sums take to other ranks, 0 without push; the result then includes the time until they have
// arrived.
double ExpectedTime(const Card& card, const LinearShape& shape, int64_t m, const Tile& tile,
                    double push_us);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_COST_H_
