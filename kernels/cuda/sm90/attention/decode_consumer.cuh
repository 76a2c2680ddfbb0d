// The consumer warps of a team in the decode schedule (decode.h), which compute. Not here: the
// producer warp, which loads keys and values (decode_load.cuh).
//
// Scores are computed transposed (keys x rows), and so is the output (head_dim x rows): keys and
// values are the 16-row operand of mma.sync, and the few query rows its 8 columns. For each of its
// two rows, a thread then has the keys of one residue mod 8, in ascending order, which is one of
// the contract's row-sum lanes. The weights become an operand by transposing 8 x 8 matrices.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_CONSUMER_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_CONSUMER_CUH_

#include <cstdint>

#include "kernels/contract/attention.h"
#include "kernels/contract/constants.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/sm90/attention/bounded_exp2.cuh"
#include "kernels/cuda/sm90/attention/decode_load.cuh"
#include "kernels/cuda/sm90/attention/decode_work.cuh"
#include "kernels/cuda/sm90/attention/matrix_fragments.cuh"
#include "kernels/cuda/sm90/device/barrier.cuh"

namespace isobit::cuda {

// What the two consumer warps of a team exchange for each tile.
template <typename Shape>
struct TeamExchange {
  // bf16, matrices of 8 keys x 8 rows; transposed, they are mma.sync's other operand.
  alignas(16) uint32_t weights[Shape::kKeyBlocks][Shape::kColumnBlocks][2][32];
  float lane_sums[kTeamConsumers][Shape::kColumnBlocks][2][32];  // written by each warp
  float max[kTeamConsumers][Shape::kRows];                       // of each warp's keys
};

// A consumer warp. For every tile it computes scores and weights of one chunk's keys, then the
// output's sums for one half of the head's columns. With g = l / 4 and q = l % 4, lane l has rows
// 2q and 2q + 1 of each block of 8 query rows.
template <typename Shape>
class DecodeConsumer {
 public:
  __device__ DecodeConsumer(const DecodeParams& p, RingCursor<Shape> ring, int team,
                            TeamExchange<Shape>& exchange, float* totals)
      : p_(p),
        ring_(ring),
        exchange_(exchange),
        team_(team),
        warp_(static_cast<int>(threadIdx.x / 32) % kTeamConsumers),
        lane_(static_cast<int>(threadIdx.x % 32)),
        q_(lane_ % 4),
        totals_(totals + warp_ * Shape::kTotalsOfWarp + lane_) {}

  __device__ void Run(const DecodeItem& item) {
    const QueryRows<Shape> rows(p_, item);
    WaitForPredecessor();
    rows.Load(p_, queries_);
    const bool whole = Shape::kWalk || item.sequence_splits.end - item.sequence_splits.first == 1;
#pragma unroll 1
    for (int32_t split = item.first_split; split < item.end_split; ++split) {
      StartSplit();
      const int32_t end = EndOfSplit(item, split);
#pragma unroll 1
      for (int32_t tile = FirstTile<Shape>(item, split); tile < end; tile += Shape::kTile) {
        RunTile(item, tile);
      }
      contract::SplitSum sums[kColumnBlocks][2];
      FinishSplit(sums);
      if (!whole) {
        StoreSplit(item, split - item.sequence_splits.first, sums);
        return;
      }
      FoldSplit(split == item.first_split, sums);
    }
    StoreRows(item);
  }

 private:
  static constexpr int kColumnBlocks = Shape::kColumnBlocks;
  static constexpr int kChunkBlocks = Shape::kChunkBlocks;

  __device__ void StartSplit() {
    fresh_ = true;
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        max_[b][i] = contract::kMinusInfinity;
        lane_sum_[b][i] = 0.0f;
      }
#pragma unroll
      for (int m = 0; m < Shape::kMine; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_[m][b][e] = 0.0f;
      }
    }
  }

  __device__ void SyncTeam() { SyncThreads(1 + team_, kTeamConsumers * 32); }

  __device__ void Release() {
    __syncwarp();
    if (lane_ == 0 || ArrivalsOf(p_) > 1) Arrive(ring_.empty());
    ring_.Next();
  }

  __device__ void RunTile(const DecodeItem& item, int32_t tile) {
    const ChunkRange chunks = ChunksOf<Shape>(item, tile);
    float scores[kChunkBlocks][kColumnBlocks][4];
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
#pragma unroll
      for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[i][b][e] = 0.0f;
      }
    }
#pragma unroll 1
    for (int32_t c = chunks.first; c < chunks.end; ++c) {
      WaitBarrier(ring_.full(), ring_.parity);
      if (c == warp_) Score(ring_.buffer(), scores);
      Release();
    }

    // Nearly always every row sees the whole tile, so that nothing is masked.
    const bool all_seen = tile + Shape::kTile <= item.first_end && tile >= item.last_begin;
    if (!all_seen) Mask(item, tile + warp_ * Shape::kChunk, scores);
    float alpha[kColumnBlocks][2];
    float shift[kColumnBlocks][2];
    const bool bounded = Shift(scores, alpha, shift);
    if (all_seen && bounded) {
      Weigh<true>(item, tile, scores, shift, alpha);
    } else {
      Weigh<false>(item, tile, scores, shift, alpha);
    }
#pragma unroll
    for (int m = 0; m < Shape::kMine; ++m) {
#pragma unroll
      for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_[m][b][e] = contract::Mul(acc_[m][b][e], alpha[b][e % 2]);
      }
    }
    SumWeights(scores, alpha);

#pragma unroll 1
    for (int32_t c = chunks.first; c < chunks.end; ++c) {
      WaitBarrier(ring_.full(), ring_.parity);
      const int32_t keys = item.end_key - (tile + c * Shape::kChunk);
      if (keys < Shape::kChunk) ClearFrom(ring_.buffer(), keys);
      AddValues(ring_.buffer(), c);
      Release();
    }
  }

  // The products of the queries with the keys of a stage.
  __device__ void Score(uint32_t base, float (&scores)[kChunkBlocks][kColumnBlocks][4]) {
#pragma unroll
    for (int first = 0; first < kChunkBlocks; first += Shape::kAbreast) {
#pragma unroll
      for (int step = 0; step < Shape::kSteps; ++step) {
#pragma unroll
        for (int i = first; i < first + Shape::kAbreast; ++i) {
          uint32_t keys[4];
          LoadMatrices(keys, base + static_cast<uint32_t>(step / 4) * Shape::kHalfBytes +
                                 Swizzled(16 * i + lane_ % 16, 2 * (step % 4) + lane_ / 16));
#pragma unroll
          for (int b = 0; b < kColumnBlocks; ++b) MmaSync(scores[i][b], keys, queries_[step][b]);
        }
      }
    }
  }

  // The position of this thread's row i of block b. The rows of a group see all keys of its split,
  // as rows at the first member's position also do.
  __device__ int32_t PositionOf(const DecodeItem& item, int b, int i) {
    if (Shape::kShares) return item.first_position;
    return item.PositionOf(p_, 8 * b + 2 * q_ + i);
  }

  __device__ void Mask(const DecodeItem& item, int32_t first_key,
                       float (&scores)[kChunkBlocks][kColumnBlocks][4]) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t last = PositionOf(item, b, i);
        const int32_t first = FirstSeen<Shape::kShares>(p_, last);
#pragma unroll
        for (int k = 0; k < kChunkBlocks; ++k) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int32_t key = first_key + 16 * k + 8 * half + g();
            if (key > last || key < first) scores[k][b][2 * half + i] = contract::kMinusInfinity;
          }
        }
      }
    }
  }

  // The first half of the contract's UpdateSoftmax: the new maxima. Returns whether every argument
  // of exp2 is small enough for BoundedExp2: a score's argument exceeds 0 by no more than the
  // rounding error of its row's shift.
  __device__ bool Shift(const float (&scores)[kChunkBlocks][kColumnBlocks][4],
                        float (&alpha)[kColumnBlocks][2], float (&shift)[kColumnBlocks][2]) {
    float max[kColumnBlocks][2];  // fmaxf is the contract's Max except for the sign of a zero
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        max[b][i] = max_[b][i];
#pragma unroll
        for (int k = 0; k < kChunkBlocks; ++k) {
          max[b][i] = fmaxf(fmaxf(max[b][i], scores[k][b][i]), scores[k][b][2 + i]);
        }
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          max[b][i] = fmaxf(max[b][i], __shfl_xor_sync(0xffffffffu, max[b][i], lanes));
        }
        if (g() == 0) exchange_.max[warp_][8 * b + 2 * q_ + i] = max[b][i];
      }
    }
    SyncTeam();
    bool bounded = true;
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        max[b][i] = fmaxf(max[b][i], exchange_.max[warp_ ^ 1][8 * b + 2 * q_ + i]);
        shift[b][i] = contract::Mul(max[b][i], p_.scale);
        alpha[b][i] = contract::Sub(contract::Mul(max_[b][i], p_.scale), shift[b][i]);
        max_[b][i] = max[b][i];
        bounded = bounded && fabsf(shift[b][i]) < 0x1p31f;
      }
    }
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) BoundedExp2(alpha[b]);
    return __all_sync(0xffffffffu, bounded);
  }

  // The second half of UpdateSoftmax: the weights, which replace the scores and are also written as
  // operands. kPlain: every row sees every key, and the arguments of exp2 are bounded.
  template <bool kPlain>
  __device__ void Weigh(const DecodeItem& item, int32_t tile,
                        float (&scores)[kChunkBlocks][kColumnBlocks][4],
                        const float (&shift)[kColumnBlocks][2], float (&alpha)[kColumnBlocks][2]) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
      bool sees[2] = {true, true};  // a row that sees no key of the tile does not change
      if (!kPlain) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int32_t position = PositionOf(item, b, i);
          sees[i] =
              position >= tile && FirstSeen<Shape::kShares>(p_, position) < tile + Shape::kTile;
          if (!sees[i]) alpha[b][i] = 1.0f;
        }
      }
#pragma unroll
      for (int first = 0; first < kChunkBlocks; first += Shape::kAbreast) {
        float x[4 * Shape::kAbreast];
#pragma unroll
        for (int e = 0; e < 4 * Shape::kAbreast; ++e) {
          x[e] = contract::Fma(scores[first + e / 4][b][e % 4], p_.scale, -shift[b][e % 2]);
        }
        if (kPlain) {
          BoundedExp2(x);
        } else {
#pragma unroll
          for (int e = 0; e < 4 * Shape::kAbreast; ++e) {
            x[e] = sees[e % 2] ? contract::Exp2(x[e]) : 0.0f;
          }
        }
#pragma unroll
        for (int k = 0; k < Shape::kAbreast; ++k) {
#pragma unroll
          for (int e = 0; e < 4; ++e) scores[first + k][b][e] = x[4 * k + e];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            exchange_.weights[warp_ * kChunkBlocks + first + k][b][half][lane_] =
                PackBf16(x[4 * k + 2 * half], x[4 * k + 2 * half + 1]);
          }
        }
      }
    }
  }

  // The row sums. A tile's first keys are the first warp's, the others the second's. So the first
  // warp passes its sums to the second, which passes them back for the next tile.
  __device__ void SumWeights(const float (&weights)[kChunkBlocks][kColumnBlocks][4],
                             const float (&alpha)[kColumnBlocks][2]) {
    if (warp_ == 0) {
      if (!fresh_) TakeSums(1);
#pragma unroll
      for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          lane_sum_[b][i] = contract::Mul(lane_sum_[b][i], alpha[b][i]);
        }
      }
      AddWeights(weights);
      LeaveSums(0);
    }
    SyncTeam();  // both warps have written their weights
    if (warp_ == 1) {
      TakeSums(0);
      AddWeights(weights);
      LeaveSums(1);
    }
    fresh_ = false;
  }
  __device__ void AddWeights(const float (&weights)[kChunkBlocks][kColumnBlocks][4]) {
#pragma unroll
    for (int k = 0; k < kChunkBlocks; ++k) {
#pragma unroll
      for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          lane_sum_[b][e % 2] = contract::Add(lane_sum_[b][e % 2], weights[k][b][e]);
        }
      }
    }
  }
  __device__ void TakeSums(int warp) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) lane_sum_[b][i] = exchange_.lane_sums[warp][b][i][lane_];
    }
  }
  __device__ void LeaveSums(int warp) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) exchange_.lane_sums[warp][b][i][lane_] = lane_sum_[b][i];
    }
  }

  // The address, within a stage, of the warp's columns 8 * unit to 8 * unit + 7 of a key.
  __device__ uint32_t UnitAt(int key, int unit) const {
    if constexpr (Shape::kHalves == 1) return Swizzled(key, warp_ * Shape::kSteps + unit);
    return static_cast<uint32_t>(warp_ * (Shape::kHalves / 2) + unit / 8) * Shape::kHalfBytes +
           Swizzled(key, unit % 8);
  }

  // The products of the weights with the values of a stage, chunk c of the tile.
  __device__ void AddValues(uint32_t base, int32_t c) {
    const uint32_t from =
        SharedAddress(&exchange_.weights[c * kChunkBlocks]) + static_cast<uint32_t>(lane_) * 16;
    uint32_t weights[4];  // four matrices: of two key blocks, or of two blocks of rows
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
      const int first = 2 * kColumnBlocks * i;
      if (first % 4 == 0) LoadTransposed(weights, from + first * 128);
#pragma unroll
      for (int m = 0; m < Shape::kMine; ++m) {
        uint32_t values[4];
        LoadTransposed(values,
                       base + UnitAt(16 * i + lane_ / 16 * 8 + lane_ % 8, 2 * m + lane_ / 8 % 2));
#pragma unroll
        for (int b = 0; b < kColumnBlocks; ++b) {
          const int at = (first + 2 * b) % 4;
          const uint32_t operand[2] = {weights[at], weights[at + 1]};
          MmaSync(acc_[m][b], values, operand);
        }
      }
    }
  }

  // Writes +0 over the part of a stage that this warp reads, from row `keys` on, where no key was
  // written. Such keys have weight +0, but 0 * NaN is not 0.
  __device__ void ClearFrom(uint32_t base, int32_t keys) {
    for (int32_t i = keys * Shape::kSteps + lane_; i < Shape::kChunk * Shape::kSteps; i += 32) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                       base + UnitAt(i / Shape::kSteps, i % Shape::kSteps)),
                   "r"(0)
                   : "memory");
    }
    FenceSharedForAsync();  // the copy engine writes here next
    __syncwarp();
  }

  __device__ void FinishSplit(contract::SplitSum (&sums)[kColumnBlocks][2]) {
    SyncTeam();  // the second warp has written its sums
    if (warp_ == 0 && !fresh_) TakeSums(1);
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = lane_sum_[b][i];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {  // ((l0+l1)+(l2+l3))+((l4+l5)+(l6+l7))
          sum = contract::Add(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
        }
        sums[b][i] = {contract::Mul(max_[b][i], p_.scale), sum};
      }
    }
  }

  // Computed where it is needed: there is no free register for it.
  __device__ int g() const { return lane_ / 4; }

  // Of the warp's m-th 16 columns, this thread has this column and the one 8 further.
  __device__ int32_t ColumnOf(int m) const { return 16 * (warp_ * Shape::kMine + m) + g(); }

  // Calls visit(b, i, row) for this thread's rows of the item.
  template <typename Visit>
  __device__ void ForEachRow(const DecodeItem& item, const Visit& visit) const {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t row = 8 * b + 2 * q_ + i;
        if (row < item.rows) visit(b, i, row);
      }
    }
  }
  // Calls visit(m, half, column) for this thread's columns below `end`.
  template <typename Visit>
  __device__ void ForEachColumn(int32_t end, const Visit& visit) const {
#pragma unroll
    for (int m = 0; m < Shape::kMine; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t column = ColumnOf(m) + 8 * half;
        if (column < end) visit(m, half, column);
      }
    }
  }

  __device__ void StoreSplit(const DecodeItem& item, int32_t split,
                             const contract::SplitSum (&sums)[kColumnBlocks][2]) {
    ForEachRow(item, [&](int b, int i, int32_t row) {
      const int64_t index = SplitIndex(p_, item.sequence, item.first_row, item.TokenOf(p_, row),
                                       item.HeadOf(p_, row), split);
      if (warp_ == 0 && g() == 0) p_.split_sums[index] = sums[b][i];
      float* const to = p_.split_acc + index * p_.acc_stride;
      ForEachColumn(p_.acc_stride, [&](int m, int half, int32_t column) {
        to[column] = acc_[m][b][2 * half + i];
      });
    });
  }

  // Folds a split into the earlier ones, which a walk keeps as its totals. In other schedules this
  // is the sequence's only split, which is folded alone.
  __device__ void FoldSplit(bool first, const contract::SplitSum (&sums)[kColumnBlocks][2]) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 2 * b + i;
        contract::SplitSum folded = {contract::kMinusInfinity, 0.0f};
        if (Shape::kWalk && !first) folded = {*Total(kSums + 2 * row), *Total(kSums + 2 * row + 1)};
        const bool skipped = sums[b][i].max == contract::kMinusInfinity;
        contract::FoldFactors factors = {};
        if (!skipped) factors = contract::Fold(folded, sums[b][i]);
#pragma unroll
        for (int m = 0; m < Shape::kMine; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& acc = acc_[m][b][2 * half + i];
            float* const total = Total((m * kColumnBlocks + b) * 4 + 2 * half + i);
            const float before = first || !Shape::kWalk ? 0.0f : *total;
            const float after = skipped ? before : contract::FoldAccumulator(before, acc, factors);
            if (Shape::kWalk) {
              *total = after;
            } else {
              acc = after;
            }
          }
        }
        if (Shape::kWalk) {
          *Total(kSums + 2 * row) = folded.max;
          *Total(kSums + 2 * row + 1) = folded.sum;
        } else {
          lane_sum_[b][i] = folded.sum;
        }
      }
    }
  }

  __device__ void StoreRows(const DecodeItem& item) {
    ForEachRow(item, [&](int b, int i, int32_t row) {
      const float sum = Shape::kWalk ? *Total(kSums + 2 * (2 * b + i) + 1) : lane_sum_[b][i];
      const float inverse = contract::Div(1.0f, sum);
      Bf16* const to = p_.out + (item.first_row + item.TokenOf(p_, row)) * p_.ldo +
                       int64_t{item.HeadOf(p_, row)} * p_.kv.head_dim;
      ForEachColumn(p_.kv.head_dim, [&](int m, int half, int32_t column) {
        const float total = Shape::kWalk ? *Total((m * kColumnBlocks + b) * 4 + 2 * half + i)
                                         : acc_[m][b][2 * half + i];
        to[column] = contract::FloatToBf16(contract::Mul(total, inverse));
      });
    });
  }

  // This thread's words in a walk's totals: its accumulators, then its rows' maxima and sums.
  static constexpr int kSums = Shape::kMine * kColumnBlocks * 4;
  __device__ float* Total(int index) const { return totals_ + index * 32; }

  const DecodeParams& p_;
  RingCursor<Shape> ring_;
  TeamExchange<Shape>& exchange_;
  int team_;
  int warp_;  // of the team's two
  int lane_;
  int q_;
  float* totals_;
  bool fresh_ = true;  // no tile of the split has been computed yet
  uint32_t queries_[Shape::kSteps][kColumnBlocks][2];
  float max_[kColumnBlocks][2];
  float lane_sum_[kColumnBlocks][2];           // the contract's lane g, while this warp adds to it
  float acc_[Shape::kMine][kColumnBlocks][4];  // columns 16m + g and 16m + g + 8 of both rows
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_CONSUMER_CUH_
