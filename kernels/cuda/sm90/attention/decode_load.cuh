// How keys and values get into shared memory in the decode schedule (decode.h): a team's ring
// buffer, and the producer warp that fills it.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_LOAD_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_LOAD_CUH_

#include <cstdint>

#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/sm90/attention/decode_work.cuh"
#include "kernels/cuda/sm90/device/barrier.cuh"
#include "kernels/cuda/sm90/device/bulk_copy.cuh"

namespace isobit::cuda {

// The number of arrivals that complete a phase of a ring's barriers: 32, one for each lane, if the
// lanes fill the stage themselves; 1, for the warp, if the copy engine fills it.
__device__ __forceinline__ uint32_t ArrivalsOf(const DecodeParams& p) { return p.run > 0 ? 1 : 32; }

// A cursor into a team's ring. Producer and consumers step through the same stages.
template <typename Shape>
struct RingCursor {
  uint32_t buffers;  // shared-memory addresses
  uint32_t barriers;
  int stages;
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t buffer() const { return buffers + stage * Shape::kStageBytes; }
  __device__ uint32_t full() const { return barriers + stage * 16; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ void Next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Initialises the barriers of all rings and prefetches the tensor maps. The loading warps run it.
template <typename Shape>
__device__ __forceinline__ void PrepareToLoad(const DecodeParams& p, uint32_t barriers) {
  if (threadIdx.x % 32 != 0) return;  // the threads of a warp would run it one after the other
  const int warp = (static_cast<int>(threadIdx.x) - kListThreads) / 32;
  if (p.run > 0) PrefetchMap(warp % 2 == 0 ? p.keys : p.values);
#pragma unroll 1
  for (int i = warp; i < kTeams * Shape::kStages; i += kTeams) {
    InitBarrier(barriers + i * 16, ArrivalsOf(p));                       // full
    InitBarrier(barriers + i * 16 + 8, kTeamConsumers * ArrivalsOf(p));  // empty
  }
  FenceBarrierInit();
}

// Where the 16 bytes at column 8 * `unit` of a half's row are, under the 128-byte swizzle.
__device__ __forceinline__ uint32_t Swizzled(int key, int unit) {
  return static_cast<uint32_t>(key * 128 + ((unit ^ (key & 7)) << 4));
}

// The block's query rows as a warp's operands: lane l has row l / 4 of each 8 rows, in the columns
// that mma.sync requires. Padding rows, and columns beyond head_dim, are +0. The constructor
// computes the addresses, which takes long, before the rows may be read; Load reads them.
template <typename Shape>
class QueryRows {
 public:
  __device__ QueryRows(const DecodeParams& p, const DecodeItem& item) {
#pragma unroll
    for (int b = 0; b < Shape::kColumnBlocks; ++b) {
      const int32_t row = 8 * b + static_cast<int32_t>(threadIdx.x % 32) / 4;
      rows_[b] = row >= item.rows ? nullptr
                                  : p.q + (item.first_row + item.TokenOf(p, row)) * p.ldq +
                                        int64_t{item.HeadOf(p, row)} * p.kv.head_dim;
    }
  }

  __device__ void Load(const DecodeParams& p,
                       uint32_t (&queries)[Shape::kSteps][Shape::kColumnBlocks][2]) const {
    if (p.aligned_q) {
      LoadBy([](const Bf16* at) { return *reinterpret_cast<const uint32_t*>(at); }, p, queries);
    } else {
      LoadBy([](const Bf16* at) { return at[0] | uint32_t{at[1]} << 16; }, p, queries);
    }
  }

 private:
  template <typename PairAt>
  __device__ void LoadBy(const PairAt& pair_at, const DecodeParams& p,
                         uint32_t (&queries)[Shape::kSteps][Shape::kColumnBlocks][2]) const {
#pragma unroll
    for (int b = 0; b < Shape::kColumnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2 * Shape::kSteps; ++i) {
        const int32_t column = 8 * i + static_cast<int32_t>(threadIdx.x % 4) * 2;
        const bool real = rows_[b] != nullptr && column < p.kv.head_dim;
        queries[i / 2][b][i % 2] = real ? pair_at(rows_[b] + column) : 0;
      }
    }
  }

  const Bf16* rows_[Shape::kColumnBlocks];
};

// Loads a chunk's keys or values into the stage at `buffer`, for a cache of any page size and
// head_dim, by ordinary loads of whole words. Out of line: rarely run code between the kernel's
// first instructions would delay them, and the kernel runs only for microseconds.
template <typename Shape, typename Word>
__device__ __noinline__ void Gather(const DecodeParams& p, int32_t first_page, int32_t kv_head,
                                    int32_t chunk, int32_t end_key, const Bf16* cache,
                                    uint32_t buffer) {
  constexpr int kElements = sizeof(Word) / sizeof(Bf16);
  constexpr int kWords = Shape::kDim / kElements;  // of a key
  constexpr int kAhead = 8;                        // a lane's words in flight
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int32_t keys = min(end_key - chunk, Shape::kChunk);
  const int32_t* pages = p.sequences.pages + first_page;
  int64_t rows[Shape::kChunk / 32];  // of keys lane, lane + 32
#pragma unroll
  for (int i = 0; i < Shape::kChunk / 32; ++i) {
    const int32_t position = chunk + min(i * 32 + lane, keys - 1);
    const int32_t index = position / p.kv.page_size;
    rows[i] = (int64_t{pages[index]} * p.kv.kv_heads + kv_head) * p.kv.page_size + position -
              index * p.kv.page_size;
  }
#pragma unroll
  for (int i = 0; i < Shape::kChunk / 32; ++i) {
#pragma unroll 1
    for (int first = 0; first < kWords; first += kAhead) {
      Word words[kAhead] = {};
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        const int at = (first + step) * 32 + lane;
        const int column = at % kWords * kElements;
        const int64_t row = __shfl_sync(0xffffffffu, rows[i], at / kWords);
        if (i * 32 + at / kWords < keys && column < p.kv.head_dim) {
          words[step] = *reinterpret_cast<const Word*>(cache + row * p.kv.head_dim + column);
        }
      }
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        const int at = (first + step) * 32 + lane;
        const int column = at % kWords * kElements;
        const uint32_t to = buffer + column / kHalfColumns * Shape::kHalfBytes +
                            Swizzled(i * 32 + at / kWords, column % kHalfColumns / 8) +
                            column % 8 * sizeof(Bf16);
        *static_cast<Word*>(__cvta_shared_to_generic(to)) = words[step];
      }
    }
  }
}

// The producer warp of a team.
template <typename Shape>
class DecodeProducer {
 public:
  __device__ DecodeProducer(const DecodeParams& p, RingCursor<Shape> ring)
      : p_(p), ring_(ring), lane_(static_cast<int>(threadIdx.x % 32)) {}

  // Starts before the predecessor has ended, with keys that earlier steps have written
  // (device_sequences.h).
  __device__ void Run(const DecodeItem& item) {
    for (int32_t split = item.first_split; split < item.end_split; ++split) {
      const int32_t end = EndOfSplit(item, split);
      const int32_t begin = FirstTile<Shape>(item, split);
      if (begin >= end) continue;
      if (p_.run > 0) LoadPages(item, begin, end);
#pragma unroll 1
      for (int32_t tile = begin; tile < end; tile += Shape::kTile) {
#pragma unroll 1
        for (int matrix = 0; matrix < 2; ++matrix) LoadTile(item, tile, matrix);
      }
    }
  }

 private:
  // A tile's keys (matrix 0) or values (1).
  __device__ void LoadTile(const DecodeItem& item, int32_t tile, int matrix) {
    const ChunkRange chunks = ChunksOf<Shape>(item, tile);
#pragma unroll 1
    for (int32_t c = chunks.first; c < chunks.end; ++c) {
      WaitBarrier(ring_.empty(), ring_.parity ^ 1);
      const int32_t chunk = tile + c * Shape::kChunk;
      const bool early =
          p_.sequences.past_is_written && chunk + Shape::kChunk <= item.first_position;
      if (!early) WaitForPredecessor();
      if (p_.run > 0) {
        CopyRuns(item, chunk, matrix == 0 ? p_.keys : p_.values);
      } else {
        const Bf16* const cache = matrix == 0 ? p_.kv.k : p_.kv.v;
        if (p_.whole_units) {
          Gather<Shape, uint4>(p_, item.first_page, item.kv_head, chunk, item.end_key, cache,
                               ring_.buffer());
        } else {
          Gather<Shape, uint32_t>(p_, item.first_page, item.kv_head, chunk, item.end_key, cache,
                                  ring_.buffer());
        }
        Arrive(ring_.full());
      }
      ring_.Next();
    }
  }

  // Loads the page numbers of positions [begin, end): lane l gets the l-th and the (l + 32)-th.
  // There are at most 64, because a page holds 8 positions or more.
  __device__ void LoadPages(const DecodeItem& item, int32_t begin, int32_t end) {
    first_page_ = PageOf(p_, begin);
    const int32_t count = PageOf(p_, end - 1) - first_page_ + 1;
    const int32_t* pages = p_.sequences.pages + item.first_page + first_page_;
    if (lane_ < count) pages_[0] = pages[lane_];
    if (lane_ + 32 < count) pages_[1] = pages[lane_ + 32];
  }

  // Also copies the keys from end_key to the end of their run; they are masked later.
  __device__ void CopyRuns(const DecodeItem& item, int32_t chunk, const CUtensorMap& map) {
    const int shift = 31 - __clz(p_.run);
    const int32_t runs = (min(item.end_key - chunk, Shape::kChunk) + p_.run - 1) >> shift;
    const int32_t run = lane_ / Shape::kHalves;
    const int32_t half = lane_ % Shape::kHalves;
    const int32_t position = chunk + (run << shift);
    const int32_t index = PageOf(p_, position);
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
    CopyBox(ring_.buffer() + half * Shape::kHalfBytes + static_cast<uint32_t>(run * p_.run) * 128,
            map, slot, half * kHalfColumns, ring_.full(),
            item.of_group ? kEvictNormal : kEvictFirst);
  }

  const DecodeParams& p_;
  RingCursor<Shape> ring_;
  int lane_;
  int32_t first_page_ = 0;
  int32_t pages_[2] = {};
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_LOAD_CUH_
