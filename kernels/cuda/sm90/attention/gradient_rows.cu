// D of C13: each row's dot product of its output and the output's gradient.
#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/sm90/attention/gradient.h"
#include "kernels/cuda/sm90/attention/softmax_fragment.cuh"
#include "kernels/ops/attention.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLaneColumns = 8;  // two leaves

__device__ __forceinline__ float TwoLeaves(const uint4& a, const uint4& b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w};
  const uint32_t y[4] = {b.x, b.y, b.z, b.w};
  float leaf[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float u[contract::kNormLeaf];
    float v[contract::kNormLeaf];
#pragma unroll
    for (int c = 0; c < contract::kNormLeaf; ++c) {
      const int word = 2 * i + c / 2;
      u[c] = contract::FromBits(c % 2 == 0 ? x[word] << 16 : x[word] & 0xffff0000u);
      v[c] = contract::FromBits(c % 2 == 0 ? y[word] << 16 : y[word] & 0xffff0000u);
    }
    leaf[i] = contract::DotLeaf(u, v);
  }
  return contract::Add(leaf[0], leaf[1]);
}

// kLanes lanes for a row and head: the tree's leaves, padded to a power of two.
template <int kLanes>
__global__ void __launch_bounds__(kThreads)
    OutputDotsKernel(const Bf16* out, const Bf16* dout, const float* log_sums, int64_t rows,
                     int64_t first_row, int64_t end_row, int32_t heads, int32_t head_dim,
                     float* output_dots, int32_t* unbounded) {
  WaitForPredecessor();
  ReleaseSuccessor();
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const int64_t item = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const int64_t row = first_row + item / heads;
  const int64_t head = item % heads;
  float sum = 0.0f;
  if (row < end_row && lane * kLaneColumns < head_dim) {
    const int64_t at = (row * heads + head) * head_dim + lane * kLaneColumns;
    sum = TwoLeaves(*reinterpret_cast<const uint4*>(dout + at),
                    *reinterpret_cast<const uint4*>(out + at));
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    sum = contract::Add(sum, __shfl_xor_sync(kAllLanes, sum, step));
  }
  if (row >= end_row || lane != 0) return;
  output_dots[head * rows + row] = sum;
  if (!(fabsf(log_sums[head * rows + row]) < 0x1p29f)) *unbounded = 1;
}

template <int kLanes>
absl::Status LaunchFor(const AttentionGradientArgs& args, int64_t first_row, int64_t end_row,
                       float* output_dots, int32_t* unbounded, const Stream& stream) {
  const TrainingAttentionArgs& f = args.forward;
  if (f.head_dim <= kLanes * kLaneColumns / 2 && kLanes > 1) {
    return LaunchFor<(kLanes > 1 ? kLanes / 2 : 1)>(args, first_row, end_row, output_dots,
                                                    unbounded, stream);
  }
  const int64_t threads = (end_row - first_row) * f.heads * kLanes;
  return Launch(OutputDotsKernel<kLanes>,
                {.blocks = dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads)),
                 .threads = dim3(kThreads)},
                stream, f.out, args.dout, f.log_sums, f.rows, first_row, end_row, f.heads,
                f.head_dim, output_dots, unbounded);
}

}  // namespace

absl::Status LaunchOutputDots(const AttentionGradientArgs& args, int64_t first_row, int64_t end_row,
                              float* output_dots, int32_t* unbounded, const Stream& stream) {
  return LaunchFor<32>(args, first_row, end_row, output_dots, unbounded, stream);
}

}  // namespace isobit::cuda
