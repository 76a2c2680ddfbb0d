// The kernel and its launcher, by number of ranks.
#include <cstdint>

#include "common/base/rank_count.h"
#include "common/base/round_up.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/vanilla.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/vanilla/hop_reduce.h"
#include "kernels/ops/reduce.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 256;

// The ranks' partials, passed by value.
struct Partials {
  const float* of_rank[contract::kLeaves];
};

// contract::HopSum. ring: starts at the rank where a ring all-reduce starts to add the element,
// else at rank 0.
template <int kRanks>
__global__ void __launch_bounds__(kThreads)
    HopKernel(const __grid_constant__ Partials partials, int64_t begin, int64_t end, int64_t count,
              bool ring, float* out) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t i = begin + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= end) return;
  const int first = ring ? contract::RingStart(i, count, kRanks) : 0;
  float values[kRanks];
#pragma unroll
  for (int hop = 0; hop < kRanks; ++hop) {
    values[hop] = partials.of_rank[(first + hop) % kRanks][i];
  }
  out[i] = contract::HopSum(values, kRanks, 0);
}

template <int kRanks>
absl::Status LaunchRanks(const ReduceArgs& args, bool ring, const Stream& stream) {
  Partials partials = {};
  for (int r = 0; r < kRanks; ++r) partials.of_rank[r] = args.partials[r];
  const auto blocks = static_cast<unsigned>(CeilDiv(args.end - args.begin, int64_t{kThreads}));
  return Launch(HopKernel<kRanks>, {.blocks = dim3(blocks), .threads = dim3(kThreads)}, stream,
                partials, args.begin, args.end, args.count, ring, args.out);
}

}  // namespace

absl::Status LaunchHopReduce(const ReduceArgs& args, bool ring, const Stream& stream) {
  switch (args.num_ranks) {
    case 1:
      return LaunchRanks<1>(args, ring, stream);
    case 2:
      return LaunchRanks<2>(args, ring, stream);
    case 4:
      return LaunchRanks<4>(args, ring, stream);
    case 8:
      return LaunchRanks<8>(args, ring, stream);
    default:
      return CheckRankCount("ranks of a sum", args.num_ranks);
  }
}

}  // namespace isobit::cuda
