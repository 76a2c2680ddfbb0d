// The softmax of one split, for a thread block that has all of the split's scores in shared memory
// (decode_cluster.h). Not here: the scores, and the products with the values.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_SOFTMAX_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_SOFTMAX_CUH_

#include <cstdint>

#include "kernels/contract/attention.h"
#include "kernels/contract/constants.h"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/sm90/attention/bounded_exp2.cuh"
#include "kernels/cuda/sm90/attention/decode_work.cuh"

namespace isobit::cuda {

// In shared memory. Rows of weights are padded, so that the 8 rows that a warp reads at once are in
// different banks.
template <typename Shape>
struct SplitSoftmax {
  static constexpr int kTiles = contract::kSplit / Shape::kTile;
  alignas(16) float scores[Shape::kRows * contract::kSplit];  // by ScoreIndex; then fp32 weights
  alignas(16) Bf16 weights[Shape::kRows][contract::kSplit + 8];
  float alpha[Shape::kRows][kTiles];
  float max[Shape::kRows];  // scaled
  contract::SplitSum sums[Shape::kRows];
};

// The index of a score. The four scores that mma.sync gives to a lane (keys g and g + 8 of 16, rows
// 2q and 2q + 1 of 8) are adjacent, as one unit. It is unit 8q + g of the 32 units of 16 keys and 8
// rows, so that the keys of one row are in different banks.
template <typename Shape>
__device__ __forceinline__ int ScoreIndex(int row, int key) {
  const int unit = (key / 16 * Shape::kColumnBlocks + row / 8) * 32 + row % 8 / 2 * 8 + key % 8;
  return unit * 4 + key % 16 / 8 * 2 + row % 2;
}

// The tiles [first, end) of a split, counted from its first, that have a key which some row sees.
struct TileRange {
  int32_t first;
  int32_t end;
};
template <typename Shape>
__device__ __forceinline__ TileRange TilesOf(const DecodeItem& item, int32_t split) {
  const int32_t begin = split * contract::kSplit;
  return {max(0, item.first_key - begin) / Shape::kTile,
          (min(item.end_key - begin, contract::kSplit) + Shape::kTile - 1) / Shape::kTile};
}

// Sets a score to -inf if the row does not see the key. Lane (g, q) has positions key + g and key +
// g + 8 against rows 2q and 2q + 1 of each 8.
template <typename Shape>
__device__ __forceinline__ void MaskScores(const DecodeParams& p, const DecodeItem& item,
                                           int32_t key, float (&scores)[Shape::kColumnBlocks][4]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (key + 16 <= item.first_end && key >= item.last_begin) return;  // every row sees them
#pragma unroll
  for (int b = 0; b < Shape::kColumnBlocks; ++b) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t last = item.PositionOf(p, 8 * b + lane % 4 * 2 + e % 2);
      const int32_t position = key + e / 2 * 8 + lane / 4;
      if (position > last || position < FirstSeen(p, last)) {
        scores[b][e] = contract::kMinusInfinity;
      }
    }
  }
}

// contract::UpdateSoftmax for all tiles of a row at once, by one warp. Maxima may be taken in any
// order, so every tile's running maximum is known before the first weight is computed.
template <typename Shape>
__device__ __forceinline__ void WeighRow(const DecodeParams& p, const DecodeItem& item,
                                         int32_t split, int row, SplitSoftmax<Shape>& softmax) {
  constexpr int kTiles = SplitSoftmax<Shape>::kTiles;
  constexpr int kOfTile = Shape::kTile / 32;  // a lane's keys of a tile: lane, lane + 32, ...
  const int lane = static_cast<int>(threadIdx.x % 32);
  float max[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    max[t] = contract::kMinusInfinity;  // fmaxf is the contract's Max except for the sign of a zero
#pragma unroll
    for (int i = 0; i < kOfTile; ++i) {
      const int key = 32 * (t * kOfTile + i) + lane;
      max[t] = fmaxf(max[t], softmax.scores[ScoreIndex<Shape>(row, key)]);
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      max[t] = fmaxf(max[t], __shfl_xor_sync(0xffffffffu, max[t], lanes));
    }
  }
  float max_of_lane = max[0];  // lane t keeps the maximum of tile t
#pragma unroll
  for (int t = 1; t < kTiles; ++t) max_of_lane = lane == t ? max[t] : max_of_lane;

  const TileRange tiles = TilesOf<Shape>(item, split);
  const int32_t position = item.PositionOf(p, row);
  const int32_t first_seen = FirstSeen(p, position);
  float before = contract::kMinusInfinity;
  // Not unrolled: a kernel usually runs this loop once, and fetching separate instructions for
  // every tile would take longer than executing the same ones again.
#pragma unroll 1
  for (int t = 0; t < kTiles; ++t) {
    const int32_t tile = split * contract::kSplit + t * Shape::kTile;
    // A tile that no row of the block sees has no scores. A row that sees no key of the tile does
    // not change.
    const bool sees =
        position >= tile && first_seen < tile + Shape::kTile && t >= tiles.first && t < tiles.end;
    const float max_of_tile = __shfl_sync(0xffffffffu, max_of_lane, t);
    const float running = sees ? fmaxf(before, max_of_tile) : before;
    const float shift = contract::Mul(running, p.scale);
    float x[kOfTile + 1];  // arguments of exp2; the last one gives alpha
#pragma unroll
    for (int i = 0; i < kOfTile; ++i) {
      const int key = 32 * (t * kOfTile + i) + lane;
      x[i] = contract::Fma(softmax.scores[ScoreIndex<Shape>(row, key)], p.scale, -shift);
    }
    x[kOfTile] = contract::Sub(contract::Mul(before, p.scale), shift);
    before = running;
    if (fabsf(shift) < 0x1p31f) {  // as in decode.cuh
      BoundedExp2(x);
    } else {
#pragma unroll
      for (float& exponent : x) exponent = contract::Exp2(exponent);
    }
#pragma unroll
    for (int i = 0; i < kOfTile; ++i) {
      const int key = 32 * (t * kOfTile + i) + lane;
      const float weight = sees ? x[i] : 0.0f;
      softmax.scores[ScoreIndex<Shape>(row, key)] = weight;
      softmax.weights[row][key] = static_cast<Bf16>(PackBf16(weight, 0.0f));
    }
    if (lane == 0) softmax.alpha[row][t] = sees ? x[kOfTile] : 1.0f;
  }
  if (lane == 0) softmax.max[row] = contract::Mul(before, p.scale);
}

// The row sums, by 8 * kRows threads in whole warps. A thread adds up lane chain % 8 of the
// contract's row-sum lanes, for row chain / 8.
template <typename Shape>
__device__ __forceinline__ void AddWeights(const DecodeItem& item, int32_t split, int chain,
                                           SplitSoftmax<Shape>& softmax) {
  const int row = chain / 8;
  const TileRange tiles = TilesOf<Shape>(item, split);
  float sum = 0.0f;
#pragma unroll 1
  for (int t = tiles.first; t < tiles.end; ++t) {
    sum = contract::Mul(sum, softmax.alpha[row][t]);
#pragma unroll
    for (int key = 0; key < Shape::kTile; key += 8) {
      sum = contract::Add(
          sum, softmax.scores[ScoreIndex<Shape>(row, t * Shape::kTile + key + chain % 8)]);
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2) {  // ((l0+l1)+(l2+l3))+((l4+l5)+(l6+l7))
    sum = contract::Add(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
  }
  if (chain % 8 == 0) softmax.sums[row] = {softmax.max[row], sum};
}

// A split's weights as an operand: 16 keys from `key` on, 8 rows from `first_row` on.
template <typename Shape>
__device__ __forceinline__ void LoadWeights(const SplitSoftmax<Shape>& softmax, int first_row,
                                            int key, uint32_t (&operand)[2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Bf16* weights = &softmax.weights[first_row + lane / 4][key + lane % 4 * 2];
  operand[0] = *reinterpret_cast<const uint32_t*>(weights);
  operand[1] = *reinterpret_cast<const uint32_t*>(weights + 8);
}

// An output of a sequence that has only one split, from the split's sum and accumulator.
__device__ __forceinline__ Bf16 OutputOfOnly(const contract::SplitSum& sum, float acc) {
  contract::SplitSum folded = {contract::kMinusInfinity, 0.0f};
  float total = 0.0f;
  if (sum.max != contract::kMinusInfinity) {
    const contract::FoldFactors factors = contract::Fold(folded, sum);
    total = contract::FoldAccumulator(0.0f, acc, factors);
  }
  return contract::FloatToBf16(contract::Mul(total, contract::Div(1.0f, folded.sum)));
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_SOFTMAX_CUH_
