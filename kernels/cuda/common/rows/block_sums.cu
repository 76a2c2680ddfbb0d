// The kernels that add blocks within a pack, and packs in a tree.
#include <algorithm>

#include "common/base/round_up.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/rows/block_sums.h"
#include "kernels/ops/packs.h"

namespace isobit::cuda {
namespace {

constexpr int kLanes = 32;        // columns of a thread block
constexpr int kLoadWarps = 16;    // that fetch sums for one chain
constexpr int kTileBlocks = 128;  // blocks whose sums are fetched at once
constexpr int kTreeWarps = 32;

// blockIdx.y: the pack. All warps fetch; the first one adds, as a chain leaves nothing to share.
__global__ void __launch_bounds__(kLanes* kLoadWarps)
    PackSumsKernel(const BlockSums sums, const __grid_constant__ PackBlocks blocks) {
  __shared__ float tile[kTileBlocks][kLanes];
  ReleaseSuccessor();
  WaitForPredecessor();
  const int pack = static_cast<int>(blockIdx.y);
  const int64_t column = int64_t{blockIdx.x} * kLanes + threadIdx.x;
  const bool inside = column < sums.columns;
  const int end = blocks.first_block[pack + 1];
  float sum = 0.0f;
  for (int first = blocks.first_block[pack]; first < end; first += kTileBlocks) {
    const int count = min(end - first, kTileBlocks);
    const float* from = sums.of_blocks + first * sums.columns + column;
#pragma unroll
    for (int i = 0; i < kTileBlocks / kLoadWarps; ++i) {
      const int block = i * kLoadWarps + static_cast<int>(threadIdx.y);
      if (inside && block < count) tile[block][threadIdx.x] = from[block * sums.columns];
    }
    __syncthreads();
    if (threadIdx.y == 0 && inside) {
#pragma unroll 8
      for (int block = 0; block < count; ++block) {
        sum = contract::Add(sum, tile[block][threadIdx.x]);
      }
    }
    __syncthreads();
  }
  if (threadIdx.y == 0 && inside) sums.of_packs[pack * sums.columns + column] = sum;
}

// blockIdx.y: which result. Warp w has the packs w, w + kTreeWarps, ...
__global__ void __launch_bounds__(kLanes* kTreeWarps)
    TreeOfPacksKernel(const BlockSums sums, int packs, const SummedColumns first,
                      const SummedColumns second) {
  __shared__ float values[kMaxPacks][kLanes];
  ReleaseSuccessor();
  WaitForPredecessor();
  const SummedColumns& result = blockIdx.y == 0 ? first : second;
  if (result.out == nullptr) return;
  const int64_t column = int64_t{blockIdx.x} * kLanes + threadIdx.x;
  const bool inside = column < result.width;
  const int warp = static_cast<int>(threadIdx.y);
  for (int pack = warp; pack < packs && inside; pack += static_cast<int>(blockDim.y)) {
    const float* from = sums.of_packs + pack * sums.columns + result.first + column;
    float sum = from[0];
#pragma unroll 8
    for (int head = 1; head < result.heads; ++head) {
      sum = contract::Add(sum, from[head * result.width]);
    }
    values[pack][threadIdx.x] = sum;
  }
  for (int count = packs / 2; count > 0; count /= 2) {
    __syncthreads();
    float sum = 0.0f;
    if (warp < count) {
      sum = contract::Add(values[2 * warp][threadIdx.x], values[2 * warp + 1][threadIdx.x]);
    }
    __syncthreads();
    if (warp < count) values[warp][threadIdx.x] = sum;
  }
  if (warp == 0 && inside) result.out[column] = values[0][threadIdx.x];
}

unsigned Tiles(int64_t columns) { return static_cast<unsigned>(CeilDiv(columns, int64_t{kLanes})); }

}  // namespace

size_t BlockSumsBytes(PackBounds packs, int64_t columns) {
  const absl::StatusOr<PackBlocks> blocks = CutIntoBlocks(packs);
  if (!blocks.ok()) return 0;  // the launch says why
  return static_cast<size_t>((blocks->count() + blocks->packs) * columns) * sizeof(float);
}

absl::Status LaunchSumBlocks(const BlockSums& sums, const PackBlocks& blocks,
                             const SummedColumns& first, const SummedColumns& second,
                             const Stream& stream) {
  // The kernel before is one of ours, which lets these start early.
  const Stream dependent = stream.WithDependent(true);
  const absl::Status status =
      Launch(PackSumsKernel,
             {.blocks = dim3(Tiles(sums.columns), static_cast<unsigned>(blocks.packs)),
              .threads = dim3(kLanes, kLoadWarps)},
             dependent, sums, blocks);
  if (!status.ok()) return status;
  const int64_t width = std::max(first.width, second.width);
  const auto warps = static_cast<unsigned>(std::min(blocks.packs, kTreeWarps));
  return Launch(
      TreeOfPacksKernel,
      {.blocks = dim3(Tiles(width), second.out == nullptr ? 1 : 2), .threads = dim3(kLanes, warps)},
      dependent, sums, blocks.packs, first, second);
}

}  // namespace isobit::cuda
