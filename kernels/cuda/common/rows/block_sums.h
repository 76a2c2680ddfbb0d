// The last step of column sums (C11): kernels write one sum per column and block of rows, and these
// are added up.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_ROWS_BLOCK_SUMS_H_
#define ISOBIT_KERNELS_CUDA_COMMON_ROWS_BLOCK_SUMS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/common/rows/packs.cuh"
#include "kernels/ops/packs.h"

namespace isobit::cuda {

// Scratch of such an op: the blocks' sums, [blocks][columns], which its own kernel writes; then the
// packs' sums.
struct BlockSums {
  float* of_blocks = nullptr;
  float* of_packs = nullptr;
  int64_t columns = 0;

  BlockSums(std::byte* scratch, const PackBlocks& blocks, int64_t columns)
      : of_blocks(reinterpret_cast<float*>(scratch)),
        of_packs(of_blocks + blocks.count() * columns),
        columns(columns) {}
};
size_t BlockSumsBytes(PackBounds packs, int64_t columns);

// A result of `width` values. Each is the sum over packs, in their tree, of the chain over `heads`
// column sums: those of columns first, first + width, ...
struct SummedColumns {
  float* out = nullptr;  // [width]
  int64_t first = 0;
  int64_t width = 0;
  int heads = 1;
};
// Computes the packs' sums from the blocks' sums, which the previous kernel on the stream writes,
// and then each result that has an `out`.
absl::Status LaunchSumBlocks(const BlockSums& sums, const PackBlocks& blocks,
                             const SummedColumns& first, const SummedColumns& second,
                             const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_ROWS_BLOCK_SUMS_H_
