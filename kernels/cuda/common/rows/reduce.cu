// The sum of the ranks' partials, element by element, in tree order (C4).
#include <cstdint>

#include "common/base/rank_count.h"
#include "common/base/round_up.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/row_columns.cuh"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/ops/reduce.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 256;

// The ranks' partials, passed by value.
struct Partials {
  const float* of_rank[contract::kLeaves];
};

template <int kRanks>
__device__ __forceinline__ float TreeOfElement(const Partials& partials, int64_t i) {
  float values[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) values[r] = partials.of_rank[r][i];
  return contract::TreeOf(values, kRanks);
}

template <int kRanks>
__global__ void __launch_bounds__(kThreads)
    TreeKernel(const Partials partials, int64_t begin, int64_t end, float* out) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t i = begin + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < end) out[i] = TreeOfElement<kRanks>(partials, i);
}

// Four elements a thread; `begin` and the pointers allow 16-byte words.
template <int kRanks>
__global__ void __launch_bounds__(kThreads)
    TreeOfFoursKernel(const Partials partials, int64_t begin, int64_t end, float* out) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t i = begin + (int64_t{blockIdx.x} * kThreads + threadIdx.x) * 4;
  if (i + 4 > end) {
    for (int64_t rest = i; rest < end; ++rest) out[rest] = TreeOfElement<kRanks>(partials, rest);
    return;
  }
  float values[4][kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    const float4 v = *reinterpret_cast<const float4*>(partials.of_rank[r] + i);
    values[0][r] = v.x, values[1][r] = v.y, values[2][r] = v.z, values[3][r] = v.w;
  }
  StoreWord(out + i, contract::BitsOf(contract::TreeOf(values[0], kRanks)),
            contract::BitsOf(contract::TreeOf(values[1], kRanks)),
            contract::BitsOf(contract::TreeOf(values[2], kRanks)),
            contract::BitsOf(contract::TreeOf(values[3], kRanks)));
}

template <int kRanks>
absl::Status LaunchRanks(const ReduceArgs& args, const Stream& stream) {
  Partials partials = {};
  bool aligned = args.begin % 4 == 0 && Aligned16(args.out);
  for (int r = 0; r < kRanks; ++r) {
    partials.of_rank[r] = args.partials[r];
    aligned = aligned && Aligned16(args.partials[r]);
  }
  const auto grid_of = [&args](int64_t elements_of_block) {
    const int64_t blocks = CeilDiv(args.end - args.begin, elements_of_block);
    return Grid{.blocks = dim3(static_cast<unsigned>(blocks)), .threads = dim3(kThreads)};
  };
  if (aligned) {
    return Launch(TreeOfFoursKernel<kRanks>, grid_of(4 * kThreads), stream, partials, args.begin,
                  args.end, args.out);
  }
  return Launch(TreeKernel<kRanks>, grid_of(kThreads), stream, partials, args.begin, args.end,
                args.out);
}

}  // namespace

// args.partials is host memory, read before the launch returns, and points to GPU memory of this
// device or a peer. INVALID_ARGUMENT: the number of ranks is not allowed (rank_count.h).
absl::Status Run(const ReduceArgs& args, const Stream& stream) {
  switch (args.num_ranks) {
    case 1:
      return LaunchRanks<1>(args, stream);
    case 2:
      return LaunchRanks<2>(args, stream);
    case 4:
      return LaunchRanks<4>(args, stream);
    case 8:
      return LaunchRanks<8>(args, stream);
    default:
      return CheckRankCount("ranks of a sum", args.num_ranks);
  }
}

}  // namespace isobit::cuda
