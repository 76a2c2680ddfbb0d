// One AdamW step (C15), element by element.
#include <cstdint>

#include "common/base/round_up.h"
#include "kernels/contract/gradients.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/ops/optimizer.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;  // elements of a thread

struct Four {
  float at[kWidth];
};
__device__ __forceinline__ Four LoadFour(const float* from) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ void StoreFour(float* to, const Four& v) {
  *reinterpret_cast<float4*>(to) = {v.at[0], v.at[1], v.at[2], v.at[3]};
}

__device__ __forceinline__ void StepOne(const AdamWArgs& a, int64_t i) {
  const contract::AdamWState state =
      contract::StepAdamW({a.parameter[i], a.m[i], a.v[i]}, a.gradient[i], a.step);
  a.parameter[i] = state.parameter;
  a.m[i] = state.m;
  a.v[i] = state.v;
  if (a.working != nullptr) a.working[i] = contract::FloatToBf16(state.parameter);
}

// kVector: all arrays are aligned.
template <bool kVector>
__global__ void __launch_bounds__(kThreads) AdamWKernel(const __grid_constant__ AdamWArgs a) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t i = thread * (kVector ? kWidth : 1);
  if (i >= a.count) return;
  if (!kVector || i + kWidth > a.count) {
    for (int64_t at = i; at < (kVector ? a.count : i + 1); ++at) StepOne(a, at);
    return;
  }
  Four p = LoadFour(a.parameter + i);
  Four m = LoadFour(a.m + i);
  Four v = LoadFour(a.v + i);
  const Four g = LoadFour(a.gradient + i);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const contract::AdamWState state =
        contract::StepAdamW({p.at[j], m.at[j], v.at[j]}, g.at[j], a.step);
    p.at[j] = state.parameter;
    m.at[j] = state.m;
    v.at[j] = state.v;
  }
  StoreFour(a.parameter + i, p);
  StoreFour(a.m + i, m);
  StoreFour(a.v + i, v);
  if (a.working != nullptr) {
    *reinterpret_cast<uint2*>(a.working + i) = {PackBf16(p.at[0], p.at[1]),
                                                PackBf16(p.at[2], p.at[3])};
  }
}

}  // namespace

absl::Status Run(const AdamWArgs& args, const Stream& stream) {
  const bool vector =
      Aligned16(args.parameter, args.m, args.v, args.gradient) && Aligned16(args.working);
  const int64_t threads = CeilDiv(args.count, int64_t{vector ? kWidth : 1});
  const auto blocks = static_cast<unsigned>(CeilDiv(threads, int64_t{kThreads}));
  return Launch(vector ? AdamWKernel<true> : AdamWKernel<false>,
                {.blocks = dim3(blocks), .threads = dim3(kThreads)}, stream, args);
}

}  // namespace isobit::cuda
