// The kernel of the decode schedule (attention_decode.h).
//
// Scores are computed transposed, keys x rows, and so is the output, head_dim x rows: keys and
// values are the 16-row operand of mma.sync and the few query rows its 8 columns. A thread then
// holds, of its two rows, the keys of one residue mod 8 in ascending order, which is one of the
// contract's row-sum lanes, and the weights become an operand by transposing 8 x 8 matrices.
#ifndef ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_CUH_
#define ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_CUH_

#include <cstdint>

#include "kernels/contract/attention.h"
#include "kernels/contract/constants.h"
#include "kernels/cuda/attention_decode_load.cuh"
#include "kernels/cuda/attention_decode_work.cuh"
#include "kernels/cuda/device/barrier.cuh"
#include "kernels/cuda/device/bounded_exp2.cuh"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/matrix_fragments.cuh"
#include "kernels/cuda/device/mma_sync.cuh"

namespace isobit::cuda {

// The consumer warp of a pair. Lane l, g = l / 4, q = l % 4, holds of each block of 8 query rows
// the rows 2q and 2q + 1.
template <typename Shape>
class DecodeConsumer {
 public:
  __device__ DecodeConsumer(const DecodeParams& p, RingCursor<Shape> ring, float* totals)
      : p_(p),
        ring_(ring),
        totals_(totals + threadIdx.x % 32),
        lane_(static_cast<int>(threadIdx.x % 32)),
        g_(lane_ / 4),
        q_(lane_ % 4) {}

  __device__ void Run(const DecodeItem& item) {
    LoadQueries(item);
    contract::SplitSum folded[kColumnBlocks][2];
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
      folded[b][0] = folded[b][1] = {contract::kMinusInfinity, 0.0f};
    }
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
      FoldSplit(split == item.first_split, sums, folded);
    }
    StoreRows(item, folded);
  }

 private:
  static constexpr int kColumnBlocks = Shape::kColumnBlocks;
  static constexpr int kChunkBlocks = Shape::kChunkBlocks;

  // Not QueryRows, with which ptxas spills here.
  __device__ void LoadQueries(const DecodeItem& item) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
      const int32_t row = 8 * b + g_;
      const bool real = row < item.rows;
      const int32_t safe = real ? row : 0;
      const Bf16* head = p_.q + (item.first_row + item.TokenOf(p_, safe)) * p_.ldq +
                         int64_t{item.HeadOf(p_, safe)} * p_.kv.head_dim;
#pragma unroll
      for (int i = 0; i < 2 * Shape::kSteps; ++i) {
        const int32_t column = 8 * i + 2 * q_;
        uint32_t pair = 0;
        if (real && column < p_.kv.head_dim) {
          pair = p_.aligned_q ? *reinterpret_cast<const uint32_t*>(head + column)
                              : head[column] | uint32_t{head[column + 1]} << 16;
        }
        queries_[i / 2][b][i % 2] = pair;
      }
    }
  }

  __device__ void StartSplit() {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        max_[b][i] = contract::kMinusInfinity;
        lane_sum_[b][i] = 0.0f;
      }
#pragma unroll
      for (int m = 0; m < Shape::kSteps; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_[m][b][e] = 0.0f;
      }
    }
  }

  __device__ void Release() {
    __syncwarp();
    if (lane_ == 0 || ArrivalsOf(p_) > 1) Arrive(ring_.empty());
    ring_.Next();
  }

  __device__ void RunTile(const DecodeItem& item, int32_t tile) {
    const ChunkRange chunks = ChunksOf<Shape>(item, tile);
    float scores[Shape::kKeyBlocks][kColumnBlocks][4];
#pragma unroll
    for (int c = 0; c < Shape::kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kChunkBlocks; ++i) {
#pragma unroll
        for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
          for (int e = 0; e < 4; ++e) scores[kChunkBlocks * c + i][b][e] = 0.0f;
        }
      }
      if (c < chunks.first || c >= chunks.end) continue;
      WaitBarrier(ring_.full(), ring_.parity);
      const uint32_t base = ring_.buffer();
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
            for (int b = 0; b < kColumnBlocks; ++b) {
              MmaSync(scores[kChunkBlocks * c + i][b], keys, queries_[step][b]);
            }
          }
        }
      }
      Release();
    }

    // Every row sees the whole tile, as nearly always: nothing to mask.
    const bool all_seen = tile + Shape::kTile <= item.first_end && tile >= item.last_begin;
    if (!all_seen) Mask(item, tile, scores);
    float alpha[kColumnBlocks][2];
    float shift[kColumnBlocks][2];
    const bool bounded = Shift(scores, alpha, shift);
    uint32_t weights[Shape::kKeyBlocks][kColumnBlocks][2];
    if (all_seen && bounded) {
      Weigh<true>(item, tile, scores, shift, alpha, weights);
    } else {
      Weigh<false>(item, tile, scores, shift, alpha, weights);
    }
#pragma unroll
    for (int m = 0; m < Shape::kSteps; ++m) {
#pragma unroll
      for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_[m][b][e] = contract::Mul(acc_[m][b][e], alpha[b][e % 2]);
      }
    }

#pragma unroll
    for (int c = 0; c < Shape::kChunks; ++c) {
      if (c < chunks.first || c >= chunks.end) continue;
      WaitBarrier(ring_.full(), ring_.parity);
      const uint32_t base = ring_.buffer();
      const int32_t keys = item.end_key - (tile + c * Shape::kChunk);
      if (keys < Shape::kChunk) ClearFrom(base, keys);
#pragma unroll
      for (int i = 0; i < kChunkBlocks; ++i) {
#pragma unroll
        for (int m = 0; m < Shape::kSteps; ++m) {
          uint32_t values[4];
          LoadTransposed(values, base + static_cast<uint32_t>(m / 4) * Shape::kHalfBytes +
                                     Swizzled(16 * i + lane_ / 16 * 8 + lane_ % 8,
                                              2 * (m % 4) + lane_ / 8 % 2));
#pragma unroll
          for (int b = 0; b < kColumnBlocks; ++b) {
            MmaSync(acc_[m][b], values, weights[kChunkBlocks * c + i][b]);
          }
        }
      }
      Release();
    }
  }

  // Of this thread's row i of a block.
  __device__ int32_t PositionOf(const DecodeItem& item, int b, int i) {
    return item.PositionOf(p_, 8 * b + 2 * q_ + i);
  }

  __device__ void Mask(const DecodeItem& item, int32_t tile,
                       float (&scores)[Shape::kKeyBlocks][kColumnBlocks][4]) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t last = PositionOf(item, b, i);
        const int32_t first = FirstSeen(p_, last);
#pragma unroll
        for (int k = 0; k < Shape::kKeyBlocks; ++k) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int32_t key = tile + 16 * k + 8 * half + g_;
            if (key > last || key < first) scores[k][b][2 * half + i] = contract::kMinusInfinity;
          }
        }
      }
    }
  }

  // The first half of the contract's UpdateSoftmax: the new maxima. Whether all exponents of two
  // are small enough for BoundedExp2: a score's is what rounding its row's shift left over.
  __device__ bool Shift(const float (&scores)[Shape::kKeyBlocks][kColumnBlocks][4],
                        float (&alpha)[kColumnBlocks][2], float (&shift)[kColumnBlocks][2]) {
    bool bounded = true;
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float max = max_[b][i];  // fmaxf is the contract's Max but for the sign of a zero
#pragma unroll
        for (int k = 0; k < Shape::kKeyBlocks; ++k) {
          max = fmaxf(fmaxf(max, scores[k][b][i]), scores[k][b][2 + i]);
        }
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, lanes));
        }
        shift[b][i] = contract::Mul(max, p_.scale);
        alpha[b][i] = contract::Sub(contract::Mul(max_[b][i], p_.scale), shift[b][i]);
        max_[b][i] = max;
        bounded = bounded && fabsf(shift[b][i]) < 0x1p31f;
      }
    }
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) BoundedExp2(alpha[b]);
    return __all_sync(0xffffffffu, bounded);
  }

  // The second half: the weights, as operands, and the row sums. kPlain: every row sees every key,
  // and the exponents are bounded.
  template <bool kPlain>
  __device__ void Weigh(const DecodeItem& item, int32_t tile,
                        const float (&scores)[Shape::kKeyBlocks][kColumnBlocks][4],
                        const float (&shift)[kColumnBlocks][2], float (&alpha)[kColumnBlocks][2],
                        uint32_t (&weights)[Shape::kKeyBlocks][kColumnBlocks][2]) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
      bool sees[2] = {true, true};  // a tile of which a row sees no key leaves the row as it is
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!kPlain) {
          const int32_t position = PositionOf(item, b, i);
          sees[i] = position >= tile && FirstSeen(p_, position) < tile + Shape::kTile;
          if (!sees[i]) alpha[b][i] = 1.0f;
        }
        lane_sum_[b][i] = contract::Mul(lane_sum_[b][i], alpha[b][i]);
      }
#pragma unroll
      for (int k = 0; k < Shape::kKeyBlocks; k += 2) {
        float x[8];  // of two key blocks
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          x[e] = contract::Fma(scores[k + e / 4][b][e % 4], p_.scale, -shift[b][e % 2]);
        }
        if (kPlain) {
          BoundedExp2(x);
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e) x[e] = sees[e % 2] ? contract::Exp2(x[e]) : 0.0f;
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          lane_sum_[b][e % 2] = contract::Add(lane_sum_[b][e % 2], x[e]);
        }
#pragma unroll
        for (int half = 0; half < 4; ++half) {
          weights[k + half / 2][b][half % 2] = Transpose(PackBf16(x[2 * half], x[2 * half + 1]));
        }
      }
    }
  }

  // +0 into the rows of a stage that hold no written key: their weight is +0, but 0 * NaN is not.
  __device__ void ClearFrom(uint32_t base, int32_t keys) {
    for (int32_t key = keys; key < Shape::kChunk; ++key) {
#pragma unroll
      for (int half = 0; half < Shape::kHalves; ++half) {
        const uint32_t to =
            base + half * Shape::kHalfBytes + static_cast<uint32_t>(key * 128 + lane_ * 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(0) : "memory");
      }
    }
    FenceSharedForAsync();  // the copy engine writes here next
    __syncwarp();
  }

  __device__ void FinishSplit(contract::SplitSum (&sums)[kColumnBlocks][2]) {
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

  __device__ void StoreSplit(const DecodeItem& item, int32_t split,
                             const contract::SplitSum (&sums)[kColumnBlocks][2]) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t row = 8 * b + 2 * q_ + i;
        if (row >= item.rows) continue;
        const int64_t index =
            SplitIndex(p_, item.sequence, item.TokenOf(p_, row), item.HeadOf(p_, row), split);
        if (g_ == 0) p_.split_sums[index] = sums[b][i];
        float* to = p_.split_acc + index * p_.acc_stride;
#pragma unroll
        for (int m = 0; m < Shape::kSteps; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int32_t column = 16 * m + 8 * half + g_;
            if (column < p_.acc_stride) to[column] = acc_[m][b][2 * half + i];
          }
        }
      }
    }
  }

  // Leaves the fold of all splits so far in acc_, or in a walk's totals.
  __device__ void FoldSplit(bool first, const contract::SplitSum (&sums)[kColumnBlocks][2],
                            contract::SplitSum (&folded)[kColumnBlocks][2]) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool skipped = sums[b][i].max == contract::kMinusInfinity;
        contract::FoldFactors factors = {};
        if (!skipped) factors = contract::Fold(folded[b][i], sums[b][i]);
#pragma unroll
        for (int m = 0; m < Shape::kSteps; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& acc = acc_[m][b][2 * half + i];
            float* total = totals_ + ((m * kColumnBlocks + b) * 4 + 2 * half + i) * 32;
            const float before = first || !Shape::kWalk ? 0.0f : *total;
            const float after = skipped ? before : contract::FoldAccumulator(before, acc, factors);
            if (Shape::kWalk) {
              *total = after;
            } else {
              acc = after;
            }
          }
        }
      }
    }
  }

  __device__ void StoreRows(const DecodeItem& item,
                            const contract::SplitSum (&folded)[kColumnBlocks][2]) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t row = 8 * b + 2 * q_ + i;
        if (row >= item.rows) continue;
        const float inverse = contract::Div(1.0f, folded[b][i].sum);
        Bf16* to = p_.out + (item.first_row + item.TokenOf(p_, row)) * p_.ldo +
                   int64_t{item.HeadOf(p_, row)} * p_.kv.head_dim;
#pragma unroll
        for (int m = 0; m < Shape::kSteps; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int32_t column = 16 * m + 8 * half + g_;
            const float total = Shape::kWalk
                                    ? totals_[((m * kColumnBlocks + b) * 4 + 2 * half + i) * 32]
                                    : acc_[m][b][2 * half + i];
            if (column < p_.kv.head_dim) {
              to[column] = contract::FloatToBf16(contract::Mul(total, inverse));
            }
          }
        }
      }
    }
  }

  const DecodeParams& p_;
  RingCursor<Shape> ring_;
  float* totals_;
  int lane_;
  int g_;
  int q_;
  uint32_t queries_[Shape::kSteps][kColumnBlocks][2];
  float max_[kColumnBlocks][2];
  float lane_sum_[kColumnBlocks][2];            // the contract's lane g
  float acc_[Shape::kSteps][kColumnBlocks][4];  // columns 16m + g and 8 more of both rows
};

template <typename Shape>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    DecodeKernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* const shared = unaligned + (1024 - SharedAddress(unaligned) % 1024) % 1024;
  ReleaseSuccessor();
  const uint32_t base = SharedAddress(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x < 2 * kPairs * Shape::kStages) {
    InitBarrier(base + Shape::kBarriers + threadIdx.x * 8, ArrivalsOf(p));
    FenceBarrierInit();
  }
  // The tables came with a copy before the step's first kernel, not from the predecessor.
  auto* const list = reinterpret_cast<int32_t*>(shared + Shape::kList);
  MakeList<Shape>(p, list);

  // Neighbouring items go to different multiprocessors, so that a short list uses all of them. A
  // list too short for all pairs leaves the rings of the idle ones to the others.
  const int32_t items = list[kListEntries];
  const int32_t blocks = static_cast<int32_t>(gridDim.x);
  const int pairs = items <= blocks ? 1 : items <= 2 * blocks ? 2 : kPairs;
  const int pair = warp % kPairs;
  RingCursor<Shape> ring;
  ring.stages = Shape::kStages * kPairs / pairs;
  ring.buffers = base + pair * ring.stages * Shape::kStageBytes;
  ring.barriers = base + Shape::kBarriers + pair * ring.stages * 16;

  const int32_t first = pair < pairs ? pair * blocks + static_cast<int32_t>(blockIdx.x) : items;
  if (warp >= kPairs) {
    DecodeProducer<Shape> producer(p, ring);
    producer.Warm();
    for (int32_t i = first; i < items; i += pairs * blocks) {
      producer.Run(DecodeItem::Find<Shape>(p, list, i));
    }
    WaitForPredecessor();  // if no chunk did
  } else {
    auto* const totals =
        reinterpret_cast<float*>(shared + Shape::kTotals + pair * Shape::kTotalBytes);
    DecodeConsumer<Shape> consumer(p, ring, totals);
    WaitForPredecessor();
    for (int32_t i = first; i < items; i += pairs * blocks) {
      consumer.Run(DecodeItem::Find<Shape>(p, list, i));
    }
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_CUH_
