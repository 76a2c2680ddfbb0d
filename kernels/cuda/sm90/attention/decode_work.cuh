// The work of the decode schedule (decode.h): its parameters, the shapes for which it is built, and
// the list of items that the kernel makes from the step's tables.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_WORK_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_WORK_CUH_

#include <cuda.h>

#include <cstdint>

#include "kernels/contract/attention.h"
#include "kernels/contract/constants.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/device_sequences.h"
#include "kernels/ops/paged_kv.h"

namespace isobit::cuda {

inline constexpr int kTeams = 4;          // per block; three warps that work on one item
inline constexpr int kTeamConsumers = 2;  // the warps that compute; one more loads keys and values
inline constexpr int kDecodeThreads = kTeams * (kTeamConsumers + 1) * 32;
inline constexpr int kListThreads = kTeams * kTeamConsumers * 32;  // those that make the list
inline constexpr int kMaxListed = 1024;                            // sequences of one launch
inline constexpr int kListWords = 3 * kMaxListed + 1;
inline constexpr int kHalfColumns = 64;  // columns in a swizzled row of 128 bytes

// Keys in one stage of a ring. Large stages give the tensor cores more independent work.
constexpr int KeysOfChunk(int32_t head_dim) { return head_dim <= 128 ? 64 : 32; }

struct DecodeParams {
  CUtensorMap keys;  // [every slot of the cache, head_dim] in boxes of `run` x 64
  CUtensorMap values;
  DeviceSequences sequences;
  int32_t first_sequence;  // of the num_listed that this launch computes
  int32_t num_listed;
  int32_t min_tokens;
  int32_t max_tokens;
  bool one_token;  // every block of query rows has one row of the batch
  bool by_row;     // splits' results are stored by batch row: fewer than by sequence and token
  const Bf16* q;
  int64_t ldq;
  bool aligned_q;  // pairs of elements can be read as words
  int32_t heads;
  int32_t heads_per_kv;  // query heads that share a KV head
  PagedKv kv;
  int32_t page_shift;  // log2 of the page size; -1: it is no power of two
  int32_t run;         // aligned runs of 2^i positions never cross a page border; 0: no bulk copies
  bool whole_units;    // every key and value consists of whole aligned 16-byte units
  float scale;
  int32_t window;  // 2^31 - 1: none
  Bf16* out;
  int64_t ldo;
  // [sequence][token < max_tokens][head][split < max_splits], or with by_row [row][head][split]:
  // the results of each split.
  contract::SplitSum* split_sums;
  float* split_acc;  // likewise, acc_stride each
  int32_t acc_stride;
  int32_t max_splits;
};

// Which of a sequence's pages holds a position. Uses shifts if possible: a division takes longer
// than a load.
__device__ __forceinline__ int32_t PageOf(const DecodeParams& p, int32_t position) {
  return p.page_shift >= 0 ? position >> p.page_shift : position / p.kv.page_size;
}

// The first key that a query at this position sees. kSeesAll: the window hides no key from any row.
template <bool kSeesAll = false>
__device__ __forceinline__ int32_t FirstSeen(const DecodeParams& p, int32_t position) {
  return kSeesAll ? 0 : max(0, position - p.window + 1);
}

// The splits [first, end) with a key that some row of a sequence sees.
struct SplitRange {
  int32_t first;
  int32_t end;
};
template <bool kSeesAll = false>
__device__ __forceinline__ SplitRange SplitsOf(const DecodeParams& p, int32_t first_position,
                                               int32_t tokens) {
  return {FirstSeen<kSeesAll>(p, first_position) / contract::kSplit,
          (first_position + tokens - 1) / contract::kSplit + 1};
}

// The index of a split of one row and head among the results of the splits.
__device__ __forceinline__ int64_t SplitIndex(const DecodeParams& p, int32_t sequence,
                                              int32_t first_row, int32_t token, int32_t head,
                                              int32_t split) {
  const int32_t row = (p.by_row ? first_row : sequence * p.max_tokens) + token;
  return (int64_t{row} * p.heads + head) * p.max_splits + split;
}

// kShares: splits that sequences share are computed once for all of them (device_sequences.h).
template <int kDim_, int kColumnBlocks_, bool kWalk_, bool kShares_ = false>
struct DecodeShape {
  static constexpr int kDim = kDim_;                    // head_dim, padded with zeros
  static constexpr int kColumnBlocks = kColumnBlocks_;  // of 8 query rows
  static constexpr bool kWalk = kWalk_;
  static constexpr bool kShares = kShares_;
  static_assert(!kWalk || !kShares);
  static constexpr int kRows = 8 * kColumnBlocks;
  static constexpr int kTile = contract::KvTile(kDim);
  static constexpr int kChunk = KeysOfChunk(kDim);
  static constexpr int kChunks = kTile / kChunk;
  static constexpr int kChunkBlocks = kChunk / 16;
  // Key blocks whose scores and weights are computed interleaved.
  static constexpr int kAbreast = kColumnBlocks == 1 ? kChunkBlocks : kWalk ? 1 : 2;
  static constexpr int kKeyBlocks = kTile / 16;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kMine = kSteps / kTeamConsumers;  // columns of a consumer warp, in 16s
  static_assert(kChunks == kTeamConsumers);
  static constexpr int kHalves = kDim / kHalfColumns;
  static constexpr uint32_t kHalfBytes = kChunk * 128;
  static constexpr uint32_t kStageBytes = kHalves * kHalfBytes;
  static constexpr int kStages = (kWalk ? 40 : 48) * 1024 / static_cast<int>(kStageBytes);
  // The folded results of a walk's team, fp32 [warp][accumulators, maxima and sums of a lane][32
  // lanes].
  static constexpr int kTotalsOfWarp = kWalk ? (kMine + 1) * kColumnBlocks * 4 * 32 : 0;
  static constexpr uint32_t kTotalBytes = kTeamConsumers * kTotalsOfWarp * sizeof(float);

  // Offsets in shared memory, from a multiple of 1024 bytes: rings, totals, what teams exchange,
  // barriers, the work list.
  static constexpr uint32_t kTotals = kTeams * kStages * kStageBytes;
  static constexpr uint32_t kExchange = kTotals + kTeams * kTotalBytes;
  static constexpr uint32_t kExchangeBytes = (2 * kTile + kTeamConsumers * (32 + 4)) * kRows;
  static constexpr uint32_t kBarriers = kExchange + kTeams * kExchangeBytes;
  static constexpr uint32_t kList = kBarriers + kTeams * kStages * 2 * sizeof(uint64_t);
  static constexpr uint32_t kSharedBytes = kList + kListWords * sizeof(int32_t) + 1024;

  // The work list (MakeList), for at most so many sequences.
  static constexpr int kEntries = kShares ? 3 : 2;  // of each sequence
  static constexpr int kListed = kShares ? kSharingWindow : kMaxListed;
  static constexpr int kFirstPages = kEntries * kListed + 1;  // where first_page is in the list
  static_assert(kFirstPages + kListed <= kListWords);
};

// What an entry of the work list stands for, and of which listed sequence (or behind which).
struct ListEntry {
  enum Kind { kGroup, kBeforeLast, kLast };
  Kind kind;
  int32_t listed;

  template <typename Shape>
  static __device__ __forceinline__ ListEntry At(const DecodeParams& p, int32_t entry) {
    const int32_t n = p.num_listed;
    if (Shape::kShares && entry < n) return {kGroup, entry};
    const int32_t own = entry - (Shape::kShares ? n : 0);
    return own >= n ? ListEntry{kLast, own - n} : ListEntry{kBeforeLast, own};
  }
};

// The first split for which a sequence has items of its own.
template <typename Shape>
__device__ __forceinline__ int32_t FirstOwnSplit(const DecodeParams& p, int32_t sequence,
                                                 const SplitRange& splits) {
  return Shape::kShares ? p.sequences.own_split[sequence] : splits.first;
}

// The number of blocks of query rows of one KV head that `tokens` rows of the batch make.
template <typename Shape>
__device__ __forceinline__ int32_t RowBlocks(const DecodeParams& p, int32_t tokens) {
  return (tokens * p.heads_per_kv + Shape::kRows - 1) / Shape::kRows;
}

// The number of items of an entry.
template <typename Shape>
__device__ __forceinline__ int32_t ItemsOf(const DecodeParams& p, const ListEntry& entry) {
  const int32_t s = p.first_sequence + entry.listed;
  if (entry.kind == ListEntry::kGroup) {
    const SharedSplits group = p.sequences.groups[s];
    return p.kv.kv_heads * RowBlocks<Shape>(p, group.num_sequences) *
           (group.end_split - group.first_split);
  }
  const int32_t tokens = p.sequences.first_row[s + 1] - p.sequences.first_row[s];
  const SplitRange splits = SplitsOf<Shape::kShares>(p, p.sequences.first_position[s], tokens);
  const int32_t before_last = splits.end - FirstOwnSplit<Shape>(p, s, splits) - 1;
  if (tokens < p.min_tokens || tokens > p.max_tokens) return 0;
  return p.kv.kv_heads * RowBlocks<Shape>(p, tokens) *
         (entry.kind == ListEntry::kLast ? 1
          : Shape::kWalk                 ? 0
                                         : before_last);
}

// Makes the work list for n listed sequences. Entry i < n is sequence i without its last split,
// entry n + i its last split; in a walk, entry n + i is all splits together. With kShares, n
// entries precede these, one for each group of sequences that share splits, and a sequence's own
// entries lack what a group computes. Entry e has the items [list[e], list[e + 1]). Last splits may
// be short. They come last, so that distributing the items in turn gives all multiprocessors about
// equally many keys. After the entries the list has each sequence's first_page, which saves the
// producers a load. The whole block calls it; the consumer warps do the work.
template <typename Shape>
__device__ __forceinline__ void MakeList(const DecodeParams& p, int32_t* list) {
  __shared__ int32_t warp_sums[kDecodeThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t entries = Shape::kEntries * p.num_listed;
  const int32_t each = (entries + kListThreads - 1) / kListThreads;  // consecutive, per thread
  const int32_t first = min(thread * each, entries);
  const int32_t end = min(first + each, entries);
  int32_t sum = 0;
#pragma unroll 1
  for (int32_t entry = first; entry < end; ++entry) {
    const auto at = ListEntry::At<Shape>(p, entry);
    if (at.kind == ListEntry::kBeforeLast) {
      list[Shape::kFirstPages + at.listed] = p.sequences.first_page[p.first_sequence + at.listed];
    }
    const int32_t count = ItemsOf<Shape>(p, at);
    list[entry] = count;
    sum += count;
  }
  int32_t before = sum;  // the inclusive sum up to this thread; below, of the threads before it
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, before, offset);
    if (thread % 32 >= offset) before += other;
  }
  if (thread % 32 == 31) warp_sums[thread / 32] = before;
  __syncthreads();
  before -= sum;
#pragma unroll
  for (int w = 0; w < kListThreads / 32; ++w) before += w < thread / 32 ? warp_sums[w] : 0;
#pragma unroll 1
  for (int32_t entry = first; entry < end; ++entry) {
    const int32_t count = list[entry];
    list[entry] = before;
    before += count;
  }
  if (thread == kListThreads - 1) list[entries] = before;
  __syncthreads();
}

// One block of query rows against one split, or in a walk against all splits that it sees. The rows
// belong to one sequence, or to a group that shares the split. In a group, row r belongs to member
// r / heads_per_kv; each member has one row, so this is the batch's row first_row + r /
// heads_per_kv, as token r / heads_per_kv of one sequence would be.
struct DecodeItem {
  int32_t sequence;    // of a group: the first one
  int32_t first_page;  // of the sequence, in the list of all pages
  int32_t kv_head;
  int32_t first_row;       // the sequence's first row in the batch
  int32_t first_position;  // likewise
  int32_t first_block_row;
  int32_t rows;       // of the block: row r is token r / heads_per_kv, head r % heads_per_kv
  int32_t first_key;  // the first key that any row of the block sees
  int32_t end_key;
  int32_t last_begin;  // every row of the block sees the keys [last_begin, first_end)
  int32_t first_end;
  int32_t first_split;  // of the item
  int32_t end_split;
  SplitRange sequence_splits;
  bool of_group = false;

  // Called by whole warps.
  template <typename Shape>
  static __device__ DecodeItem Find(const DecodeParams& p, const int32_t* list, int32_t index) {
    const int32_t n = p.num_listed;
    const int lane = static_cast<int>(threadIdx.x % 32);
    int32_t low = 0;  // the last entry with list[low] <= index
    int32_t end = Shape::kEntries * n;
#pragma unroll 1
    for (int32_t step = (end + 31) / 32; step > 0; step = step == 1 ? 0 : (step + 31) / 32) {
      const int32_t entry = low + lane * step;
      const uint32_t at_most =
          __ballot_sync(0xffffffffu, entry < end && list[min(entry, end)] <= index);
      low += (__popc(at_most) - 1) * step;
      end = min(low + step, end);
    }
    const auto at = ListEntry::At<Shape>(p, low);
    const int32_t rest = index - list[low];
    DecodeItem item;
    if (at.kind == ListEntry::kGroup) {
      item.SetGroup<Shape>(p, list, p.sequences.groups[p.first_sequence + at.listed], rest);
      return item;
    }
    const bool last = at.kind == ListEntry::kLast;
    item.SetSequence(p, at.listed, list[Shape::kFirstPages + at.listed]);
    const int32_t tokens = p.sequences.first_row[item.sequence + 1] - item.first_row;
    item.sequence_splits = SplitsOf<Shape::kShares>(p, item.first_position, tokens);
    const int32_t first_own = FirstOwnSplit<Shape>(p, item.sequence, item.sequence_splits);
    const int32_t before_last = item.sequence_splits.end - first_own - 1;
    const int32_t blocks = RowBlocks<Shape>(p, tokens);
    const int32_t splits = last ? 1 : before_last;
    const int32_t row_block = splits == 1 ? rest : rest / splits;
    const int32_t head = blocks == 1 ? row_block : row_block / blocks;
    item.SetRows<Shape>(p, tokens, head, row_block - head * blocks);
    if (Shape::kWalk) {
      item.first_split = item.first_key / contract::kSplit;
      item.end_split = (item.end_key - 1) / contract::kSplit + 1;
    } else {
      item.first_split = first_own + (last ? before_last : rest - row_block * splits);
      item.end_split = item.first_split + 1;
    }
    return item;
  }

  __device__ void SetSequence(const DecodeParams& p, int32_t listed, int32_t page) {
    sequence = p.first_sequence + listed;
    first_page = page;
    first_row = p.sequences.first_row[sequence];
    first_position = p.sequences.first_position[sequence];
  }

  // Makes this item `index` of a group. Neighbouring items are blocks of rows of the same split, so
  // that they find its keys and values in the L2 cache. Every row sees all keys of the split.
  template <typename Shape>
  __device__ void SetGroup(const DecodeParams& p, const int32_t* list, const SharedSplits& group,
                           int32_t index) {
    const int32_t listed = group.first_sequence - p.first_sequence;
    SetSequence(p, listed, list[Shape::kFirstPages + listed]);
    sequence_splits = SplitsOf<Shape::kShares>(p, first_position, 1);
    const int32_t blocks = RowBlocks<Shape>(p, group.num_sequences);
    const int32_t splits = group.end_split - group.first_split;
    const int32_t split_of_head = index / blocks;
    const int32_t head = split_of_head / splits;
    SetRows<Shape>(p, group.num_sequences, head, index - split_of_head * blocks);
    first_split = group.first_split + split_of_head - head * splits;
    end_split = first_split + 1;
    end_key = end_split * contract::kSplit;
    first_end = end_key;
    of_group = true;
  }

  // Sets the item's rows: block `block` of the rows of KV head `head`.
  template <typename Shape>
  __device__ void SetRows(const DecodeParams& p, int32_t tokens, int32_t head, int32_t block) {
    kv_head = head;
    first_block_row = block * Shape::kRows;
    rows = min(Shape::kRows, tokens * p.heads_per_kv - first_block_row);
    const int32_t first = first_position + TokenOf(p, 0);
    const int32_t last = first_position + TokenOf(p, rows - 1);
    first_key = FirstSeen<Shape::kShares>(p, first);
    end_key = last + 1;
    last_begin = FirstSeen<Shape::kShares>(p, last);
    first_end = first + 1;
  }

  // A padding row has the last row's position.
  __device__ int32_t PositionOf(const DecodeParams& p, int32_t row) const {
    return first_position + TokenOf(p, min(row, rows - 1));
  }
  __device__ int32_t TokenOf(const DecodeParams& p, int32_t row) const {
    return p.one_token ? 0 : (first_block_row + row) / p.heads_per_kv;
  }
  __device__ int32_t HeadOf(const DecodeParams& p, int32_t row) const {
    const int32_t index = first_block_row + row;
    return kv_head * p.heads_per_kv + (p.one_token ? index : index % p.heads_per_kv);
  }
};

// The chunks [first, end) of the tile at `tile` that have a key of [first_key, end_key).
struct ChunkRange {
  int32_t first;
  int32_t end;
};
template <typename Shape>
__device__ __forceinline__ ChunkRange ChunksOf(const DecodeItem& item, int32_t tile) {
  return {max(0, item.first_key - tile) / Shape::kChunk,
          (min(item.end_key - tile, Shape::kTile) + Shape::kChunk - 1) / Shape::kChunk};
}
template <typename Shape>
__device__ __forceinline__ int32_t FirstTile(const DecodeItem& item, int32_t split) {
  return max(split * contract::kSplit, item.first_key / Shape::kTile * Shape::kTile);
}
__device__ __forceinline__ int32_t EndOfSplit(const DecodeItem& item, int32_t split) {
  return min((split + 1) * contract::kSplit, item.end_key);
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_WORK_CUH_
