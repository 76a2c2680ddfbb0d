// The schedules of attention's gradient for one head size, and the kernel that runs before them.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_H_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/base/round_up.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/attention.h"

namespace isobit::cuda {

struct GradientParams;

// Keys in a block of the kernel of dK and dV, for a schedule of so many columns.
constexpr int32_t KeyTileRows(int32_t columns) { return columns > 128 ? 64 : 128; }

// The number of tiles of `rows` rows in all sequences.
inline int64_t CountTiles(const PassSequences& sequences, int32_t rows) {
  int64_t tiles = 0;
  for (size_t i = 0; i + 1 < sequences.bounds.size(); ++i) {
    tiles += CeilDiv(sequences.bounds[i + 1] - sequences.bounds[i], rows);
  }
  return tiles;
}

// D of C13 for rows [first_row, end_row): output_dots [heads, rows]. Sets *unbounded if the log-sum
// of one of them is not below 2^29. head_dim is a multiple of 8, at most 256.
absl::Status LaunchOutputDots(const AttentionGradientArgs& args, int64_t first_row, int64_t end_row,
                              float* output_dots, int32_t* unbounded, const Stream& stream);

// dK and dV, or dQ, of the KV heads that the parameters name. `sequences` determines the number of
// tiles. Instantiated in training_<head size>.cu.
template <int kHeadDim>
absl::Status LaunchKeyGradient(const GradientParams& params, const PassSequences& sequences,
                               const Stream& stream);
template <int kHeadDim>
absl::Status LaunchQueryGradient(const GradientParams& params, const PassSequences& sequences,
                                 const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_H_
