// The balanced tree over one value a leaf. Every block adds up one aligned subtree, and the next
// launch goes on with these sums, until one is left. A sequence's sum is one block's alone.
#include <cstdint>

#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/contract/portable.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/rows/leaf_tree.cuh"
#include "kernels/ops/losses.h"
#include "kernels/ops/optimizer.h"

namespace isobit::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kValues = 16;                 // of a lane
constexpr int kOfWarp = kWarp * kValues;    // consecutive leaves
constexpr int kOfBlock = kWarps * kOfWarp;  // likewise

// The subtree over x[0 .. count), at most kOfBlock of it, by a whole block; valid in thread 0.
// `leaves`: of the subtree, at most kOfBlock. of_warps: [kWarps], shared memory.
template <typename T>
__device__ T Subtree(const T* x, int64_t count, int leaves, T* of_warps) {
  const int lane = static_cast<int>(threadIdx.x);
  const int warp = static_cast<int>(threadIdx.y);
  const int64_t first = warp * kOfWarp + lane;
  T values[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int64_t at = first + i * kWarp;
    values[i] = at < count ? x[at] : T{0};
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = TreeOfLeaves(values[i], 1, leaves);
#pragma unroll
  for (int step = 1; step < kValues; step *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; i += 2 * step) {
      values[i] = JoinNeighbours(values[i], values[i + step], step * kWarp, leaves);
    }
  }
  if (lane == 0) of_warps[warp] = values[0];
  __syncthreads();
  if (warp != 0) return T{0};
  return TreeOfLeaves(lane < kWarps ? of_warps[lane] : T{0}, kOfWarp, leaves);
}

// `leaves`: of the tree over x, at most kOfBlock if there is one block.
template <typename T>
__global__ void __launch_bounds__(kWarp* kWarps)
    TreeSumKernel(const T* x, int64_t count, int leaves, T* sums) {
  __shared__ T of_warps[kWarps];
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t first = int64_t{blockIdx.x} * kOfBlock;
  const T sum = Subtree(x + first, count - first, leaves, of_warps);
  if (threadIdx.x == 0 && threadIdx.y == 0) sums[blockIdx.x] = sum;
}

// A block for each sequence, which adds up its aligned subtrees one after the other.
__global__ void __launch_bounds__(kWarp* kWarps) SequenceSumsKernel(const SequenceSumsArgs a) {
  __shared__ float of_warps[kWarps];
  ReleaseSuccessor();
  WaitForPredecessor();
  const float* const x = a.x + a.bounds[blockIdx.x];
  const int64_t count = a.bounds[blockIdx.x + 1] - a.bounds[blockIdx.x];
  const auto leaves = static_cast<int>(count > kOfBlock ? kOfBlock : PaddedLeaves(count));
  contract::TreeSum tree;  // thread 0's
  for (int64_t first = 0; first < count; first += kOfBlock) {
    const float sum = Subtree(x + first, count - first, leaves, of_warps);
    if (threadIdx.x == 0 && threadIdx.y == 0) tree.Push(sum);
    __syncthreads();  // of_warps is read
  }
  if (threadIdx.x == 0 && threadIdx.y == 0) a.sums[blockIdx.x] = tree.Total();
}

int64_t BlocksOf(int64_t count) { return CeilDiv(count, int64_t{kOfBlock}); }

// The sums of all launches but the last.
template <typename T>
size_t WorkspaceBytes(int64_t count) {
  int64_t sums = 0;
  for (int64_t left = BlocksOf(count); left > 1; left = BlocksOf(left)) sums += left;
  return static_cast<size_t>(sums) * sizeof(T);
}

template <typename T>
absl::Status LaunchTree(const T* x, int64_t count, T* sum, std::byte* workspace,
                        const Stream& stream) {
  T* scratch = reinterpret_cast<T*>(workspace);
  Stream of_launch = stream;
  for (;;) {
    const int64_t blocks = count > 0 ? BlocksOf(count) : 1;
    T* const to = blocks > 1 ? scratch : sum;
    const auto leaves = static_cast<int>(blocks > 1 ? kOfBlock : PaddedLeaves(count));
    const absl::Status status =
        Launch(TreeSumKernel<T>,
               {.blocks = dim3(static_cast<unsigned>(blocks)), .threads = dim3(kWarp, kWarps)},
               of_launch, x, count, leaves, to);
    if (!status.ok() || blocks == 1) return status;
    x = to;
    count = blocks;
    scratch += blocks;
    of_launch.dependent = true;  // on a kernel of ours
  }
}

}  // namespace

absl::Status Run(const TreeSumArgs& args, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(std::byte* const workspace,
                          ScratchOf(stream, WorkspaceBytes<float>(args.count)));
  return LaunchTree(args.x, args.count, args.sum, workspace, stream);
}

absl::Status Run(const SequenceSumsArgs& args, const Stream& stream) {
  return Launch(
      SequenceSumsKernel,
      {.blocks = dim3(static_cast<unsigned>(args.sequences)), .threads = dim3(kWarp, kWarps)},
      stream, args);
}

absl::Status Run(const TreeSum64Args& args, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(std::byte* const workspace,
                          ScratchOf(stream, WorkspaceBytes<double>(args.count)));
  return LaunchTree(args.x, args.count, args.sum, workspace, stream);
}

}  // namespace isobit::cuda
