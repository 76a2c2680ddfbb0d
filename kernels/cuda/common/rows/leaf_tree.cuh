// C5's tree over values that may be -0. The number of leaves is padded to a power of two and no
// further, because -0 plus the padding's +0 is +0. (Sums of squares are never -0, so kernels may
// pad them freely.)
#ifndef ISOBIT_KERNELS_CUDA_COMMON_ROWS_LEAF_TREE_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_ROWS_LEAF_TREE_CUH_

#include <cstdint>

#include "kernels/contract/portable.h"

namespace isobit::cuda {

// The number of leaves, including padding, of the tree over `count` leaves.
__host__ __device__ inline int64_t PaddedLeaves(int64_t count) {
  int64_t padded = 1;
  while (padded < count) padded *= 2;
  return padded;
}

// One step: the sum of two neighbours of `width` leaves each, in a tree of `leaves` leaves.
template <typename T>
__device__ __forceinline__ T JoinNeighbours(T left, T right, int width, int leaves) {
  return width < leaves ? contract::Add(left, right) : left;
}

// The tree over the lanes of a warp, of `width` leaves each; valid in lane 0. fp32 addition
// commutes, so it does not matter that some lanes add right to left.
template <typename T>
__device__ __forceinline__ T TreeOfLeaves(T sum, int width, int leaves) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    sum =
        JoinNeighbours(sum, __shfl_xor_sync(0xffffffffu, sum, distance), distance * width, leaves);
  }
  return sum;
}

template <typename T>
__device__ __forceinline__ T OfLane0(T value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_ROWS_LEAF_TREE_CUH_
