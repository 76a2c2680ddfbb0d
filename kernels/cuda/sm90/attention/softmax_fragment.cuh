// The contract's online softmax (C6) on scores in the registers in which a product leaves them.
//
// A thread has two rows h = 0, 1 of a fragment: scores[4j + 2h + e] is row h's column 8j + 2q + e,
// with q = lane % 4. These columns are exactly the row-sum lanes 2q and 2q + 1, and keys ascend
// with j. So threads exchange only the maximum, and the sum when a split ends. The four threads of
// a row have the same maximum.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_SOFTMAX_FRAGMENT_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_SOFTMAX_FRAGMENT_CUH_

#include <cstdint>

#include "kernels/contract/attention.h"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/sm90/attention/bounded_exp2.cuh"

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

// The state of the two rows in the current split.
struct SoftmaxFragment {
  float max[2];
  float lanes[2][2];

  __device__ __forceinline__ void Reset() {
    for (int h = 0; h < 2; ++h) {
      max[h] = contract::kMinusInfinity;
      lanes[h][0] = lanes[h][1] = 0.0f;
    }
  }

  // Sets the scores of unseen keys to -inf.
  template <int kTile>
  static __device__ __forceinline__ void Mask(float (&scores)[kTile / 2], const SeenKeys& seen) {
    const int q = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) {
      const int key = i / 4 * 8 + 2 * q + i % 2;
      const int h = i / 2 % 2;
      scores[i] = key <= seen.upto[h] && key > seen.after[h] ? scores[i] : contract::kMinusInfinity;
    }
  }

  // One update (contract::UpdateSoftmax): scores become weights, and the caller must multiply row
  // h's accumulators by alpha[h]. shift_of_none: the shift of a row whose maximum is -inf. If the
  // row sees a key of the tile, the contract says -inf. If it sees none, it is 0: every weight is
  // then +0, and alpha, which is 0, multiplies zeros or NaN, so the row does not change.
  template <int kTile>
  __device__ __forceinline__ void Update(float (&scores)[kTile / 2], float scale,
                                         const float (&shift_of_none)[2], float (&alpha)[2]) {
    // Four chains of maxima for each row hide their latency.
    float top[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int first = i / 2 * 4 + i % 2 * 2;
      top[i] = fmaxf(scores[first], scores[first + 1]);
    }
#pragma unroll
    for (int i = 16; i < kTile / 2; i += 2) {
      float& t = top[i % 16 / 2];
      t = fmaxf(t, fmaxf(scores[i], scores[i + 1]));
    }
    float tops[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      tops[h] = fmaxf(max[h], fmaxf(fmaxf(top[h], top[2 + h]), fmaxf(top[4 + h], top[6 + h])));
    }
#pragma unroll
    for (int step = 1; step <= 2; ++step) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        tops[h] = fmaxf(tops[h], __shfl_xor_sync(kAllLanes, tops[h], step));
      }
    }
    float shift[2];
    bool bounded = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      shift[h] =
          tops[h] == contract::kMinusInfinity ? shift_of_none[h] : contract::Mul(tops[h], scale);
      alpha[h] = contract::Sub(contract::Mul(max[h], scale), shift[h]);  // at most 0
      max[h] = tops[h];
      // A score is at most the maximum, so the argument of exp2 exceeds 0 by no more than the
      // rounding error of the shift.
      bounded = bounded && fabsf(shift[h]) < 0x1p29f;
    }
    if (__builtin_expect(__all_sync(kAllLanes, bounded), 1)) {
      Weigh<kTile, true>(scores, scale, shift, alpha);
    } else {
      Weigh<kTile, false>(scores, scale, shift, alpha);
    }
  }

  // Packs the weights as the A operands of the k16 steps over keys 16k .. 16k + 15.
  template <int kTile>
  static __device__ __forceinline__ void Pack(const float (&scores)[kTile / 2],
                                              uint32_t (&weights)[kTile / 16][4]) {
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) {
      weights[i / 4][i % 4] = PackBf16(scores[2 * i], scores[2 * i + 1]);
    }
  }

  // The row's sum of the split, in the contract's order (contract::FinishSplit).
  __device__ __forceinline__ contract::SplitSum Finish(int h, float scale) const {
    float sum = contract::Add(lanes[h][0], lanes[h][1]);
    sum = contract::Add(sum, __shfl_xor_sync(kAllLanes, sum, 1));
    sum = contract::Add(sum, __shfl_xor_sync(kAllLanes, sum, 2));
    return {contract::Mul(max[h], scale), sum};
  }

 private:
  template <int kTile, bool kBounded>
  __device__ __forceinline__ void Weigh(float (&scores)[kTile / 2], float scale,
                                        const float (&shift)[2], float (&alpha)[2]) {
    BoundedExp2(alpha);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      lanes[i / 2][i % 2] = contract::Mul(lanes[i / 2][i % 2], alpha[i / 2]);
#pragma unroll
    for (int k = 0; k < kTile / 2; k += kBatch) {
      float p[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        p[i] = contract::Fma(scores[k + i], scale, -shift[i / 2 % 2]);
      }
      if (kBounded) {
        BoundedExp2(p);
      } else {
        for (float& x : p) x = contract::Exp2(x);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        float& sum = lanes[i / 2 % 2][i % 2];
        sum = contract::Add(sum, p[i]);
        scores[k + i] = p[i];
      }
    }
  }
  static constexpr int kBatch = 8;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_SOFTMAX_FRAGMENT_CUH_
