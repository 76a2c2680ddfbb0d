// AdamW's moments in bf16 (C15): a thread has the 8 elements that share a block of noise.
#include <cstdint>

#include "common/base/round_up.h"
#include "kernels/contract/gradients.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/ops/optimizer.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = contract::kDitherWidth;

__global__ void __launch_bounds__(kThreads)
    DitherKernel(const __grid_constant__ DitherArgs a, bool is_aligned) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const uint64_t counter = a.first / kWidth + uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  // The thread's first element in x; before it in the first thread, if the part begins amid a
  // block.
  const int64_t begin = static_cast<int64_t>(counter * kWidth - a.first);
  if (begin >= a.count) return;
  const contract::PhiloxBlock block = contract::DitherNoise(a.step, a.moment, counter);
  if (is_aligned && begin >= 0 && begin + kWidth <= a.count) {
    const float4 low = *reinterpret_cast<const float4*>(a.x + begin);
    const float4 high = *reinterpret_cast<const float4*>(a.x + begin + 4);
    const float x[kWidth] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t pairs[kWidth / 2];
#pragma unroll
    for (uint64_t i = 0; i < kWidth; i += 2) {
      pairs[i / 2] = contract::DitherBf16(x[i], contract::DitherOf(block, i)) |
                     uint32_t{contract::DitherBf16(x[i + 1], contract::DitherOf(block, i + 1))}
                         << 16;
    }
    *reinterpret_cast<uint4*>(a.out + begin) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    return;
  }
  for (int i = 0; i < kWidth; ++i) {
    const int64_t at = begin + i;
    if (at < 0 || at >= a.count) continue;
    a.out[at] = contract::DitherBf16(a.x[at], contract::DitherOf(block, static_cast<uint64_t>(i)));
  }
}

}  // namespace

absl::Status Run(const DitherArgs& args, const Stream& stream) {
  const uint64_t first_counter = args.first / kWidth;
  const uint64_t end_counter =
      CeilDiv(args.first + static_cast<uint64_t>(args.count), uint64_t{kWidth});
  const uint64_t blocks = CeilDiv(end_counter - first_counter, uint64_t{kThreads});
  const bool is_aligned = args.first % kWidth == 0 && Aligned16(args.x) && Aligned16(args.out);
  return Launch(DitherKernel,
                {.blocks = dim3(static_cast<unsigned>(args.count == 0 ? 0 : blocks)),
                 .threads = dim3(kThreads)},
                stream, args, is_aligned);
}

}  // namespace isobit::cuda
