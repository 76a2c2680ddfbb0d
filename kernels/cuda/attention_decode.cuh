// The kernel of the decode schedule (attention_decode.h).
//
// Scores are computed transposed, keys x rows, and so is the output, head_dim x rows: keys and
// values are the 16-row operand of mma.sync and the few query rows its 8 columns. A thread then
// holds, of its two rows, the keys of one residue mod 8 in ascending order, which is one of the
// contract's row-sum lanes, and the weights become an operand by transposing 8 x 8 matrices.
#ifndef ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_CUH_
#define ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_CUH_

#include <cuda.h>

#include <cstdint>

#include "kernels/contract/attention.h"
#include "kernels/contract/constants.h"
#include "kernels/cuda/device/barrier.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/matrix_fragments.cuh"
#include "kernels/cuda/device/mma_sync.cuh"
#include "kernels/cuda/sequences.h"
#include "kernels/ops.h"

namespace isobit::cuda {

inline constexpr int kPairs = 4;  // producer and consumer warps of a block
inline constexpr int kDecodeThreads = 2 * kPairs * 32;
inline constexpr int kChunk = 32;        // keys of one stage of a ring
inline constexpr int kMaxListed = 1024;  // sequences of one launch
inline constexpr int kHalfColumns = 64;  // columns of a swizzled row of 128 bytes
inline constexpr uint32_t kHalfBytes = kChunk * 128;

struct DecodeParams {
  CUtensorMap keys;  // [every slot of the cache, head_dim] in boxes of `run` x 64
  CUtensorMap values;
  DeviceSequences sequences;
  int32_t first_sequence;  // of the num_listed that this launch handles
  int32_t num_listed;
  int32_t min_tokens;
  int32_t max_tokens;
  const Bf16* q;
  int64_t ldq;
  bool aligned_q;  // pairs of elements can be read as words
  int32_t heads;
  int32_t group;  // query heads of one KV head
  PagedKv kv;
  int32_t run;  // consecutive positions, aligned, that never leave a page; 0: no bulk copies
  float scale;
  int32_t window;  // 2^31 - 1: none
  Bf16* out;
  int64_t ldo;
  // [sequence][token < max_tokens][head][split < max_splits]: what each split hands on.
  contract::SplitSum* split_sums;
  float* split_acc;  // likewise, [head_dim] each
  int32_t max_splits;
};

// First key that a query at this position sees.
__device__ __forceinline__ int32_t FirstSeen(const DecodeParams& p, int32_t position) {
  return max(0, position - p.window + 1);
}

// The splits of which some row of a sequence sees a key: [first, end).
struct SplitRange {
  int32_t first;
  int32_t end;
};
__device__ __forceinline__ SplitRange SplitsOf(const DecodeParams& p, int32_t first_position,
                                               int32_t tokens) {
  return {FirstSeen(p, first_position) / contract::kSplit,
          (first_position + tokens - 1) / contract::kSplit + 1};
}

// Index of a split of one row and head among the split results.
__device__ __forceinline__ int64_t SplitIndex(const DecodeParams& p, int32_t sequence,
                                              int32_t token, int32_t head, int32_t split) {
  return ((int64_t{sequence} * p.max_tokens + token) * p.heads + head) * p.max_splits + split;
}

template <int kDim_, int kColumnBlocks_, bool kWalk_>
struct DecodeShape {
  static constexpr int kDim = kDim_;                    // head_dim, padded with zeros
  static constexpr int kColumnBlocks = kColumnBlocks_;  // of 8 query rows
  static constexpr bool kWalk = kWalk_;
  static constexpr int kRows = 8 * kColumnBlocks;
  static constexpr int kTile = contract::KvTile(kDim);
  static constexpr int kChunks = kTile / kChunk;
  static constexpr int kKeyBlocks = kTile / 16;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kHalves = kDim / kHalfColumns;
  static constexpr uint32_t kStageBytes = kHalves * kHalfBytes;
  static constexpr int kStages = (kWalk ? 40 : 48) * 1024 / static_cast<int>(kStageBytes);
  // A walking pair's folded accumulators, fp32 [kSteps * kColumnBlocks * 4][32 lanes].
  static constexpr uint32_t kTotalBytes =
      kWalk ? uint32_t{kSteps} * kColumnBlocks * 4 * 32 * sizeof(float) : 0;

  // Shared memory, from a multiple of 1024 bytes: rings, totals, barriers, the work list.
  static constexpr uint32_t kTotals = kPairs * kStages * kStageBytes;
  static constexpr uint32_t kBarriers = kTotals + kPairs * kTotalBytes;
  static constexpr uint32_t kList = kBarriers + kPairs * kStages * 2 * sizeof(uint64_t);
  static constexpr uint32_t kSharedBytes = kList + (kMaxListed + 1) * sizeof(int32_t) + 1024;
};

// The work list: items of sequence i are [list[i], list[i + 1]). Called by the whole block.
template <typename Shape>
__device__ void MakeList(const DecodeParams& p, int32_t* list) {
  constexpr int kPerThread = kMaxListed / kDecodeThreads;
  __shared__ int32_t warp_sums[kDecodeThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  int32_t counts[kPerThread];
  int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int32_t listed = thread * kPerThread + i;
    int32_t count = 0;
    if (listed < p.num_listed) {
      const int32_t s = p.first_sequence + listed;
      const int32_t tokens = p.sequences.first_row[s + 1] - p.sequences.first_row[s];
      if (tokens >= p.min_tokens && tokens <= p.max_tokens) {
        const SplitRange splits = SplitsOf(p, p.sequences.first_position[s], tokens);
        count = p.kv.kv_heads * ((tokens * p.group + Shape::kRows - 1) / Shape::kRows) *
                (Shape::kWalk ? 1 : splits.end - splits.first);
      }
    }
    counts[i] = count;
    sum += count;
  }
  int32_t before = sum;  // and before this thread, once the inclusive sum is complete
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, before, offset);
    if (thread % 32 >= offset) before += other;
  }
  if (thread % 32 == 31) warp_sums[thread / 32] = before;
  __syncthreads();
  before -= sum;
  for (int w = 0; w < thread / 32; ++w) before += warp_sums[w];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    list[thread * kPerThread + i] = before;
    before += counts[i];
  }
  if (thread == kDecodeThreads - 1) list[kMaxListed] = before;
  __syncthreads();
}

// One block of query rows against one split, or in a walk against all it sees.
struct DecodeItem {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_row;       // of the batch: the sequence's
  int32_t first_position;  // likewise
  int32_t first_block_row;
  int32_t rows;       // of the block: row r is token r / group, head r % group of the group
  int32_t first_key;  // keys that any row of the block sees
  int32_t end_key;
  int32_t last_begin;  // keys that every row of the block sees: [last_begin, first_end)
  int32_t first_end;
  int32_t first_split;  // of the item
  int32_t end_split;
  SplitRange sequence_splits;

  template <typename Shape>
  static __device__ DecodeItem Find(const DecodeParams& p, const int32_t* list, int32_t index) {
    int32_t low = 0;  // the last sequence with list[low] <= index
#pragma unroll 1
    for (int32_t step = kMaxListed / 2; step > 0; step /= 2) {
      if (list[low + step] <= index) low += step;
    }
    DecodeItem item;
    item.sequence = p.first_sequence + low;
    item.first_row = p.sequences.first_row[item.sequence];
    item.first_position = p.sequences.first_position[item.sequence];
    const int32_t tokens = p.sequences.first_row[item.sequence + 1] - item.first_row;
    item.sequence_splits = SplitsOf(p, item.first_position, tokens);
    const int32_t splits = Shape::kWalk ? 1 : item.sequence_splits.end - item.sequence_splits.first;
    const int32_t blocks = (tokens * p.group + Shape::kRows - 1) / Shape::kRows;
    int32_t rest = index - list[low];
    const int32_t split = rest % splits;
    rest /= splits;
    const int32_t block = rest % blocks;
    item.kv_head = rest / blocks;
    item.first_block_row = block * Shape::kRows;
    item.rows = min(Shape::kRows, tokens * p.group - item.first_block_row);
    const int32_t first_position = item.first_position + item.TokenOf(p, 0);
    const int32_t last_position = item.first_position + item.TokenOf(p, item.rows - 1);
    item.first_key = FirstSeen(p, first_position);
    item.end_key = last_position + 1;
    item.last_begin = FirstSeen(p, last_position);
    item.first_end = first_position + 1;
    if (Shape::kWalk) {
      item.first_split = item.first_key / contract::kSplit;
      item.end_split = (item.end_key - 1) / contract::kSplit + 1;
    } else {
      item.first_split = item.sequence_splits.first + split;
      item.end_split = item.first_split + 1;
    }
    return item;
  }

  __device__ int32_t TokenOf(const DecodeParams& p, int32_t row) const {
    return (first_block_row + row) / p.group;
  }
  __device__ int32_t HeadOf(const DecodeParams& p, int32_t row) const {
    return kv_head * p.group + (first_block_row + row) % p.group;
  }
};

// The chunks [first, end) of the tile at `tile` that hold a key of [first_key, end_key).
struct ChunkRange {
  int32_t first;
  int32_t end;
};
template <typename Shape>
__device__ __forceinline__ ChunkRange ChunksOf(const DecodeItem& item, int32_t tile) {
  return {max(0, item.first_key - tile) / kChunk,
          (min(item.end_key - tile, Shape::kTile) + kChunk - 1) / kChunk};
}
template <typename Shape>
__device__ __forceinline__ int32_t FirstTile(const DecodeItem& item, int32_t split) {
  return max(split * contract::kSplit, item.first_key / Shape::kTile * Shape::kTile);
}
__device__ __forceinline__ int32_t EndOfSplit(const DecodeItem& item, int32_t split) {
  return min((split + 1) * contract::kSplit, item.end_key);
}

// A position in a pair's ring. Producer and consumer step through the same stages.
template <typename Shape>
struct RingCursor {
  uint32_t buffers;  // shared-memory addresses
  uint32_t barriers;
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t buffer() const { return buffers + stage * Shape::kStageBytes; }
  __device__ uint32_t full() const { return barriers + stage * 16; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ void Next() {
    if (++stage == Shape::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Where the 16 bytes at column 8 * `unit` of a half's row lie under the 128-byte swizzle.
__device__ __forceinline__ uint32_t Swizzled(int key, int unit) {
  return static_cast<uint32_t>(key * 128 + ((unit ^ (key & 7)) << 4));
}

// The producer warp of a pair.
template <typename Shape>
class DecodeProducer {
 public:
  __device__ DecodeProducer(const DecodeParams& p, RingCursor<Shape> ring)
      : p_(p), ring_(ring), lane_(static_cast<int>(threadIdx.x % 32)) {}

  __device__ void Run(const DecodeItem& item) {
    for (int32_t split = item.first_split; split < item.end_split; ++split) {
      const int32_t end = EndOfSplit(item, split);
      const int32_t begin = FirstTile<Shape>(item, split);
      if (begin >= end) continue;
      if (p_.run > 0) LoadPages(item, begin, end);
#pragma unroll 1
      for (int32_t tile = begin; tile < end; tile += Shape::kTile) {
        const ChunkRange chunks = ChunksOf<Shape>(item, tile);
        for (int matrix = 0; matrix < 2; ++matrix) {
#pragma unroll 1
          for (int32_t c = chunks.first; c < chunks.end; ++c) {
            WaitBarrier(ring_.empty(), ring_.parity ^ 1);
            const int32_t chunk = tile + c * kChunk;
            if (p_.run > 0) {
              CopyRuns(item, chunk, matrix == 0 ? p_.keys : p_.values);
            } else {
              Gather(item, chunk, matrix == 0 ? p_.kv.k : p_.kv.v);
            }
            ring_.Next();
          }
        }
      }
    }
  }

 private:
  // The pages of positions [begin, end), at most 64 as they hold 8 positions or more: lane l gets
  // pages l and l + 32 of them.
  __device__ void LoadPages(const DecodeItem& item, int32_t begin, int32_t end) {
    first_page_ = begin / p_.kv.page_size;
    const int32_t count = (end - 1) / p_.kv.page_size - first_page_ + 1;
    const int32_t* pages =
        p_.sequences.pages + p_.sequences.first_page[item.sequence] + first_page_;
    if (lane_ < count) pages_[0] = pages[lane_];
    if (lane_ + 32 < count) pages_[1] = pages[lane_ + 32];
  }

  // Keys from end_key to the end of their run come along unseen: they are masked later.
  __device__ void CopyRuns(const DecodeItem& item, int32_t chunk, const CUtensorMap& map) {
    const int32_t runs = (min(item.end_key - chunk, kChunk) + p_.run - 1) / p_.run;
    const int32_t run = lane_ / Shape::kHalves;
    const int32_t half = lane_ % Shape::kHalves;
    const int32_t position = chunk + run * p_.run;
    const int32_t index = position / p_.kv.page_size;
    const int32_t near = index - first_page_;
    const int32_t low = __shfl_sync(0xffffffffu, pages_[0], near & 31);
    const int32_t high = __shfl_sync(0xffffffffu, pages_[1], near & 31);
    const int32_t page = near < 32 ? low : high;
    if (lane_ == 0) {
      ExpectBytes(ring_.full(), static_cast<uint32_t>(runs * p_.run * Shape::kHalves) * 128);
    }
    __syncwarp();
    if (run >= runs) return;
    const int32_t slot = (page * p_.kv.kv_heads + item.kv_head) * p_.kv.page_size + position -
                         index * p_.kv.page_size;
    CopyBox(ring_.buffer() + half * kHalfBytes + static_cast<uint32_t>(run * p_.run) * 128, map,
            slot, half * kHalfColumns, ring_.full(), kEvictFirst);
  }

  // Any page size and head_dim: two elements a lane and step.
  __device__ void Gather(const DecodeItem& item, int32_t chunk, const Bf16* cache) {
    const int32_t keys = min(item.end_key - chunk, kChunk);
    const int32_t* pages = p_.sequences.pages + p_.sequences.first_page[item.sequence];
    for (int32_t key = 0; key < keys; ++key) {
      const int32_t position = chunk + key;
      const int64_t page = pages[position / p_.kv.page_size];
      const Bf16* row = cache + ((page * p_.kv.kv_heads + item.kv_head) * p_.kv.page_size +
                                 position % p_.kv.page_size) *
                                    p_.kv.head_dim;
#pragma unroll
      for (int column = 0; column < Shape::kDim; column += 64) {
        const int c = column + 2 * lane_;
        const uint32_t pair = c < p_.kv.head_dim ? row[c] | uint32_t{row[c + 1]} << 16 : 0;
        const uint32_t to = ring_.buffer() + static_cast<uint32_t>(column / 64) * kHalfBytes +
                            Swizzled(key, lane_ / 4) + static_cast<uint32_t>(lane_ % 4) * 4;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pair) : "memory");
      }
    }
    __syncwarp();
    if (lane_ == 0) Arrive(ring_.full());
  }

  const DecodeParams& p_;
  RingCursor<Shape> ring_;
  int lane_;
  int32_t first_page_ = 0;
  int32_t pages_[2] = {};
};

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
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // a row of padding sees what the last row does
        const int32_t position =
            item.first_position + item.TokenOf(p_, min(8 * b + 2 * q_ + i, item.rows - 1));
        last_seen_[b][i] = position;
        first_seen_[b][i] = FirstSeen(p_, position);
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
    if (lane_ == 0) Arrive(ring_.empty());
    ring_.Next();
  }

  __device__ void RunTile(const DecodeItem& item, int32_t tile) {
    const ChunkRange chunks = ChunksOf<Shape>(item, tile);
    float scores[Shape::kKeyBlocks][kColumnBlocks][4];
#pragma unroll
    for (int c = 0; c < Shape::kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
          for (int e = 0; e < 4; ++e) scores[2 * c + i][b][e] = 0.0f;
        }
      }
      if (c < chunks.first || c >= chunks.end) continue;
      WaitBarrier(ring_.full(), ring_.parity);
      const uint32_t base = ring_.buffer();
#pragma unroll
      for (int step = 0; step < Shape::kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t keys[4];
          LoadMatrices(keys, base + static_cast<uint32_t>(step / 4) * kHalfBytes +
                                 Swizzled(16 * i + lane_ % 16, 2 * (step % 4) + lane_ / 16));
#pragma unroll
          for (int b = 0; b < kColumnBlocks; ++b) {
            MmaSync(scores[2 * c + i][b], keys, queries_[step][b]);
          }
        }
      }
      Release();
    }

    // Every row sees the whole tile, as nearly always: nothing to mask.
    const bool all_seen = tile + Shape::kTile <= item.first_end && tile >= item.last_begin;
    uint32_t weights[Shape::kKeyBlocks][kColumnBlocks][2];
    float alpha[kColumnBlocks][2];
    if (all_seen) {
      Weigh<false>(tile, scores, weights, alpha);
    } else {
      Weigh<true>(tile, scores, weights, alpha);
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
      const int32_t keys = item.end_key - (tile + c * kChunk);
      if (keys < kChunk) ClearFrom(base, keys);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < Shape::kSteps; ++m) {
          uint32_t values[4];
          LoadTransposed(values, base + static_cast<uint32_t>(m / 4) * kHalfBytes +
                                     Swizzled(16 * i + lane_ / 16 * 8 + lane_ % 8,
                                              2 * (m % 4) + lane_ / 8 % 2));
#pragma unroll
          for (int b = 0; b < kColumnBlocks; ++b) {
            MmaSync(acc_[m][b], values, weights[2 * c + i][b]);
          }
        }
      }
      Release();
    }
  }

  // The contract's online-softmax update (UpdateSoftmax) of two rows a block.
  template <bool kMasked>
  __device__ void Weigh(int32_t tile, float (&scores)[Shape::kKeyBlocks][kColumnBlocks][4],
                        uint32_t (&weights)[Shape::kKeyBlocks][kColumnBlocks][2],
                        float (&alpha)[kColumnBlocks][2]) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
      bool sees[2] = {true, true};
      float shift[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float max = max_[b][i];
#pragma unroll
        for (int k = 0; k < Shape::kKeyBlocks; ++k) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& score = scores[k][b][2 * half + i];
            if (kMasked) {
              const int32_t key = tile + 16 * k + 8 * half + g_;
              if (key > last_seen_[b][i] || key < first_seen_[b][i]) {
                score = contract::kMinusInfinity;
              }
            }
            max = contract::Max(max, score);
          }
        }
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          max = contract::Max(max, __shfl_xor_sync(0xffffffffu, max, lanes));
        }
        shift[i] = contract::Mul(max, p_.scale);
        alpha[b][i] = contract::Exp2(contract::Sub(contract::Mul(max_[b][i], p_.scale), shift[i]));
        if (kMasked) {  // a tile that the row does not see leaves it as it is
          sees[i] = last_seen_[b][i] >= tile && first_seen_[b][i] < tile + Shape::kTile;
          if (!sees[i]) alpha[b][i] = 1.0f;
        }
        max_[b][i] = max;
        lane_sum_[b][i] = contract::Mul(lane_sum_[b][i], alpha[b][i]);
      }
#pragma unroll
      for (int k = 0; k < Shape::kKeyBlocks; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float weight[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            weight[i] =
                contract::Exp2(contract::Fma(scores[k][b][2 * half + i], p_.scale, -shift[i]));
            if (kMasked && !sees[i]) weight[i] = 0.0f;
            lane_sum_[b][i] = contract::Add(lane_sum_[b][i], weight[i]);
          }
          weights[k][b][half] = Transpose(PackBf16(weight[0], weight[1]));
        }
      }
    }
  }

  // +0 into the rows of a stage that hold no written key: their weight is +0, but 0 * NaN is not.
  __device__ void ClearFrom(uint32_t base, int32_t keys) {
    for (int32_t key = keys; key < kChunk; ++key) {
#pragma unroll
      for (int half = 0; half < Shape::kHalves; ++half) {
        const uint32_t to = base + half * kHalfBytes + static_cast<uint32_t>(key * 128 + lane_ * 4);
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
        float* to = p_.split_acc + index * p_.kv.head_dim;
#pragma unroll
        for (int m = 0; m < Shape::kSteps; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int32_t column = 16 * m + 8 * half + g_;
            if (column < p_.kv.head_dim) to[column] = acc_[m][b][2 * half + i];
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
  int32_t first_seen_[kColumnBlocks][2];  // keys that each row sees
  int32_t last_seen_[kColumnBlocks][2];
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
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int pair = warp % kPairs;
  RingCursor<Shape> ring;
  ring.buffers = SharedAddress(shared) + pair * Shape::kStages * Shape::kStageBytes;
  ring.barriers = SharedAddress(shared) + Shape::kBarriers + pair * Shape::kStages * 16;
  if (warp < kPairs && threadIdx.x % 32 < Shape::kStages) {
    InitBarrier(ring.barriers + threadIdx.x % 32 * 16, 1);
    InitBarrier(ring.barriers + threadIdx.x % 32 * 16 + 8, 1);
    FenceBarrierInit();
  }
  WaitForPredecessor();
  auto* const list = reinterpret_cast<int32_t*>(shared + Shape::kList);
  MakeList<Shape>(p, list);

  // Neighbouring items go to different multiprocessors, so that a short list uses all of them.
  const int32_t stride = static_cast<int32_t>(gridDim.x) * kPairs;
  const int32_t first = pair * static_cast<int32_t>(gridDim.x) + static_cast<int32_t>(blockIdx.x);
  const int32_t items = list[kMaxListed];
  if (warp >= kPairs) {
    DecodeProducer<Shape> producer(p, ring);
    for (int32_t i = first; i < items; i += stride) {
      producer.Run(DecodeItem::Find<Shape>(p, list, i));
    }
  } else {
    auto* const totals =
        reinterpret_cast<float*>(shared + Shape::kTotals + pair * Shape::kTotalBytes);
    DecodeConsumer<Shape> consumer(p, ring, totals);
    for (int32_t i = first; i < items; i += stride) {
      consumer.Run(DecodeItem::Find<Shape>(p, list, i));
    }
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_CUH_
