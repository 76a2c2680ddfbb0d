// Heads of q, k and v in the lanes of a warp: q and k norm and the rotation, for the kernels
// between the qkv projection and attention.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_ROWS_HEADS_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_ROWS_HEADS_CUH_

#include <cstdint>

#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/row_columns.cuh"

namespace isobit::cuda {

inline constexpr int kWarp = 32;

// ---- Heads of whole, aligned vectors: lane l of a head's lanes has columns 8l .. 8l+7

constexpr int LanesFor(int head_dim) {
  int lanes = 2;
  while (lanes * kColumns < head_dim) lanes *= 2;
  return lanes;
}
// The number of lanes of a head: the smallest power of two that holds all its columns.
template <int kHeadDim>
constexpr int kLanesOfHead = LanesFor(kHeadDim);

// A lane's role in its warp, and the angles of its row's position.
struct Lane {
  int head;     // the index of the lane's task in the warp
  int partner;  // the lane that has the other halves of this lane's pairs
  float cosine[kColumns];
  float sine[kColumns];  // negated in the first half, so that both halves use the same expression
};

// cosines, sines: [positions, kHeadDim / 2]. index: this lane's, among the lanes of its head.
template <int kHeadDim>
__device__ __forceinline__ void LoadAngles(const float* cosines, const float* sines,
                                           int32_t position, int index, Lane* lane) {
  constexpr int kHalf = kHeadDim / kColumns / 2;
  const int64_t entry = int64_t{position} * (kHeadDim / 2) + index % kHalf * kColumns;
  LoadFloats(cosines + entry, lane->cosine);
  LoadFloats(sines + entry, lane->sine);
#pragma unroll
  for (float& sine : lane->sine) sine = index < kHalf ? -sine : sine;
}

// Replaces every head's value x by f(x). If every lane computed an f with divisions for all its
// heads, this would be a third of the work. So each lane computes f for one head and shares the
// result with the head's lanes.
template <int kHeadDim, int kHeads, typename F>
__device__ __forceinline__ void OnceForEachHead(float (&values)[kHeads], int head, F f) {
  constexpr int kLanesEach = kLanesOfHead<kHeadDim>;
  static_assert(kHeads <= kLanesEach);
  float mine = values[0];
#pragma unroll
  for (int i = 1; i < kHeads; ++i) mine = threadIdx.x % kHeads == i ? values[i] : mine;
  mine = f(mine);
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    values[i] = kHeads == 1 ? mine : __shfl_sync(0xffffffffu, mine, head * kLanesEach + i);
  }
}

// contract::InverseRms of each head. Every lane of the warp takes part; lanes beyond a head have
// +0.
template <int kHeadDim, int kHeads>
__device__ __forceinline__ void InverseRmsOfHeads(const Columns (&x)[kHeads], int head, float eps,
                                                  float (&inverse)[kHeads]) {
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    inverse[i] = TreeOfLanes<kLanesOfHead<kHeadDim>>(SumOfSquares(x[i]));
  }
  OnceForEachHead<kHeadDim>(inverse, head,
                            [&](float sum) { return contract::InverseRms(sum, kHeadDim, eps); });
}

// contract::Rotate of each head.
template <int kHeads>
__device__ __forceinline__ void RotateHeads(Columns (&x)[kHeads], const Lane& lane) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const uint32_t mine = x[h].pairs[i];
      const uint32_t other = __shfl_sync(0xffffffffu, mine, lane.partner);
      x[h].pairs[i] = PackBf16(contract::Fma(LowOf(mine), lane.cosine[2 * i],
                                             contract::Mul(LowOf(other), lane.sine[2 * i])),
                               contract::Fma(HighOf(mine), lane.cosine[2 * i + 1],
                                             contract::Mul(HighOf(other), lane.sine[2 * i + 1])));
    }
  }
}

// contract::Normalise, if there is a weight, and contract::Rotate of each head. Every lane of the
// warp takes part; lanes beyond a head have +0.
template <int kHeadDim, int kHeads>
__device__ __forceinline__ void NormaliseAndRotate(Columns (&x)[kHeads], bool normalise,
                                                   const Columns& weight, float eps,
                                                   const Lane& lane) {
  if (normalise) {
    float inverse[kHeads];
    InverseRmsOfHeads<kHeadDim>(x, lane.head, eps, inverse);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) x[i] = NormaliseColumns(x[i], inverse[i], weight);
  }
  RotateHeads(x, lane);
}

__device__ __forceinline__ bool AllFinite(const Columns& x) {
  bool finite = true;
#pragma unroll
  for (const uint32_t pair : x.pairs) {
    finite = finite && (pair & 0x7f80u) != 0x7f80u && (pair & 0x7f800000u) != 0x7f800000u;
  }
  return finite;
}

// For a head whose v is not finite, sets all its lanes to the poisoned key, and v to +0.
template <int kHeadDim>
__device__ __forceinline__ void MarkUnfit(int head, Columns* k, Columns* v) {
  constexpr int kLanesEach = kLanesOfHead<kHeadDim>;
  constexpr unsigned kHeadMask = kLanesEach == kWarp ? ~0u : (1u << kLanesEach % kWarp) - 1;
  const unsigned unfit = __ballot_sync(0xffffffffu, !AllFinite(*v));
  if ((unfit >> (head * kLanesEach) & kHeadMask) == 0) return;
  constexpr uint32_t kPoisonedPair = contract::kPoisonedKey * 0x10001u;
  *k = {{kPoisonedPair, kPoisonedPair, kPoisonedPair, kPoisonedPair}};
  *v = {};
}

// ---- Heads of any size

// The sum of squares of x[0..n), for every lane of the warp.
__device__ inline float SumOfSquaresOfWarp(const contract::Bf16* x, int32_t n) {
  contract::TreeSum tree;
  const int lane = static_cast<int>(threadIdx.x);
  for (int begin = 0; begin < n; begin += kWarp * contract::kNormLeaf) {
    const int first = begin + lane * contract::kNormLeaf;
    const int left = min(n - first, contract::kNormLeaf);
    tree.Push(TreeOfLanes(left > 0 ? contract::SumOfSquares(x + first, left) : 0.0f));
  }
  return tree.Total();
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_ROWS_HEADS_CUH_
