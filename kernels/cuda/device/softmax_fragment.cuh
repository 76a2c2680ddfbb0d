// The contract's online softmax (C6) on scores as a tensor-core product leaves them in registers.
//
// A thread holds two rows h = 0, 1 of a fragment: scores[4j + 2h + e] is row h's column
// 8j + 2q + e, q = lane % 4. These columns are exactly the row-sum lanes 2q and 2q + 1, keys
// ascending with j, so that only the maximum, and the sum when a split ends, cross threads. A row's
// four threads hold the same maximum.
#ifndef ISOBIT_KERNELS_CUDA_DEVICE_SOFTMAX_FRAGMENT_CUH_
#define ISOBIT_KERNELS_CUDA_DEVICE_SOFTMAX_FRAGMENT_CUH_

#include <cstdint>

#include "kernels/contract/attention.h"
#include "kernels/cuda/device/bounded_exp2.cuh"
#include "kernels/cuda/device/mma_sync.cuh"

namespace isobit::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

// Which keys of a tile the two rows see: those in (after[h], upto[h]], counted from the tile's
// first key.
struct SeenKeys {
  int32_t after[2];
  int32_t upto[2];

  __device__ __forceinline__ bool Any(int h, int tile) const {
    return upto[h] >= 0 && after[h] < tile - 1;
  }
};

// The state of the two rows in the split under way.
struct SoftmaxFragment {
  float max[2];
  float lanes[2][2];

  __device__ __forceinline__ void Reset() {
    for (int h = 0; h < 2; ++h) {
      max[h] = contract::kMinusInfinity;
      lanes[h][0] = lanes[h][1] = 0.0f;
    }
  }

  // One update over a tile all of whose keys are seen by both rows. On return weights[k] is the A
  // operand of the k16 step over keys 16k .. 16k + 15, and alpha[h] what row h's accumulators are
  // multiplied by.
  template <int kTile>
  __device__ __forceinline__ void Update(float (&scores)[kTile / 2], float scale,
                                         uint32_t (&weights)[kTile / 16][4], float (&alpha)[2]) {
    const float no_keys_shift[2] = {contract::kMinusInfinity, contract::kMinusInfinity};
    UpdateShifted<kTile>(scores, scale, no_keys_shift, weights, alpha);
  }

  // The same over a tile of which each row sees some keys, or none: then the row's state stays as
  // it is and its weights are +0.
  template <int kTile>
  __device__ __forceinline__ void UpdateSeen(float (&scores)[kTile / 2], const SeenKeys& seen,
                                             float scale, uint32_t (&weights)[kTile / 16][4],
                                             float (&alpha)[2]) {
    const int q = static_cast<int>(threadIdx.x % 4);
    for (int j = 0; j < kTile / 8; ++j) {
      for (int i = 0; i < 4; ++i) {
        const int key = 8 * j + 2 * q + i % 2;
        const bool sees = key <= seen.upto[i / 2] && key > seen.after[i / 2];
        scores[4 * j + i] = sees ? scores[4 * j + i] : contract::kMinusInfinity;
      }
    }
    // A row that has seen no key keeps the maximum -inf; a finite shift then weighs every key +0,
    // and its alpha of 0 meets a state that is all zeros.
    float no_keys_shift[2];
    for (int h = 0; h < 2; ++h) {
      no_keys_shift[h] = seen.Any(h, kTile) ? contract::kMinusInfinity : 0.0f;
    }
    UpdateShifted<kTile>(scores, scale, no_keys_shift, weights, alpha);
  }

  // The row's sum of the split, in the contract's order (contract::FinishSplit).
  __device__ __forceinline__ contract::SplitSum Finish(int h, float scale) const {
    float sum = contract::Add(lanes[h][0], lanes[h][1]);
    sum = contract::Add(sum, __shfl_xor_sync(kAllLanes, sum, 1));
    sum = contract::Add(sum, __shfl_xor_sync(kAllLanes, sum, 2));
    return {contract::Mul(max[h], scale), sum};
  }

 private:
  // no_keys_shift: the shift of a row whose maximum is -inf.
  template <int kTile>
  __device__ __forceinline__ void UpdateShifted(float (&scores)[kTile / 2], float scale,
                                                const float (&no_keys_shift)[2],
                                                uint32_t (&weights)[kTile / 16][4],
                                                float (&alpha)[2]) {
    float shift[2];
    bool bounded = true;
    for (int h = 0; h < 2; ++h) {
      float top = max[h];
      for (int j = 0; j < kTile / 8; ++j) {
        top = fmaxf(top, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      shift[h] = top == contract::kMinusInfinity ? no_keys_shift[h] : contract::Mul(top, scale);
      alpha[h] = contract::Exp2(contract::Sub(contract::Mul(max[h], scale), shift[h]));
      max[h] = top;
      lanes[h][0] = contract::Mul(lanes[h][0], alpha[h]);
      lanes[h][1] = contract::Mul(lanes[h][1], alpha[h]);
      // A score is at most the maximum, so its exponent exceeds 0 by the rounding of the shift
      // only.
      bounded = bounded && fabsf(shift[h]) < 0x1p29f;
    }
    if (__all_sync(kAllLanes, bounded)) {
      Weigh<kTile, true>(scores, scale, shift, weights);
    } else {
      Weigh<kTile, false>(scores, scale, shift, weights);
    }
  }

  template <int kTile, bool kBounded>
  __device__ __forceinline__ void Weigh(const float (&scores)[kTile / 2], float scale,
                                        const float (&shift)[2],
                                        uint32_t (&weights)[kTile / 16][4]) {
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      float p[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        p[i] = contract::Fma(scores[8 * k + i], scale, -shift[i / 2 % 2]);
      }
      if (kBounded) {
        BoundedExp2(p);
      } else {
        for (float& x : p) x = contract::Exp2(x);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& sum = lanes[i / 2 % 2][i % 2];
        sum = contract::Add(sum, p[i]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = PackBf16(p[2 * i], p[2 * i + 1]);
    }
  }
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_DEVICE_SOFTMAX_FRAGMENT_CUH_
