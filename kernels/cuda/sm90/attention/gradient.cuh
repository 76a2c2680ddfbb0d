// Shared by the kernels of attention's gradient: their parameters, the ring of tiles in shared
// memory, the weights of a tile, and the output of the results. Not here: the products
// (gradient_keys.cuh, gradient_queries.cuh).
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_CUH_

#include <cuda.h>

#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/sm90/attention/bounded_exp2.cuh"
#include "kernels/cuda/sm90/attention/prefill_ring.cuh"
#include "kernels/cuda/sm90/device/barrier.cuh"
#include "kernels/cuda/sm90/device/bulk_copy.cuh"
#include "kernels/cuda/sm90/device/wgmma.cuh"

namespace isobit::cuda {

// Passed by value. The maps' boxes have 64 rows of 64 columns of a head.
struct GradientParams {
  CUtensorMap q_map;
  CUtensorMap dout_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  const int32_t* bounds;  // [num_sequences + 1]
  int32_t num_sequences;
  int32_t heads_per_kv;
  int32_t kv_heads;
  int32_t head_dim;  // at most the schedule's; columns beyond it count as +0
  int32_t window;    // 0: none
  float scale;
  float gradient_scale;
  int64_t rows;
  const float* log_sums;     // [kv_heads * heads_per_kv, rows]: L
  const float* output_dots;  // likewise: D
  const int32_t* unbounded;  // [1]; not 0: some log-sum is too large for BoundedExp2
  int32_t first_kv_head;     // of this launch
  int32_t launch_kv_heads;   // KV heads of this launch
  // ds of this launch's heads for the kernel of dQ, or null: [heads][pairs] tiles (ScoreTile).
  std::byte* score_gradients;
  int64_t pairs;  // of tiles, in all sequences
  Bf16* dq;
  Bf16* dk;
  Bf16* dv;
};

// A tile of rows in shared memory: blocks of 64 columns, with 128 bytes per row under the 128-byte
// swizzle.
inline constexpr int kBoxRows = 64;
inline constexpr int kBoxBytes = kBoxRows * 128;

// ds in memory: a tile of 64 keys and 64 queries, keys by queries, laid out as in shared memory. A
// sequence's tiles that causality permits are stored query tile by query tile.
inline constexpr int kScoreTileBytes = 64 * 128;
__host__ __device__ inline int64_t ScoreTilesBefore(int64_t query_tile) {
  return query_tile * (query_tile + 1) / 2;
}

// A tile of a sequence, for one block to work on.
struct SequenceTile {
  int32_t first_row;   // of the sequence
  int32_t length;      // rows of the sequence
  int32_t first_pair;  // pairs of tiles in the sequences before
  int32_t tile;        // its index
};

// Tile number `index` of all sequences, in tiles of tile_rows rows. False: there are fewer. The
// tiles of a sequence are in ascending order.
__device__ __forceinline__ bool FindTile(const GradientParams& p, int tile_rows, int index,
                                         SequenceTile* work) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int pairs_before = 0;
  for (int first = 0; first < p.num_sequences; first += 32) {
    const int sequence = first + lane;
    int begin = 0;
    int rows = 0;
    if (sequence < p.num_sequences) {
      begin = p.bounds[sequence];
      rows = p.bounds[sequence + 1] - begin;
    }
    const int tiles = (rows + tile_rows - 1) / tile_rows;
    const int pairs = static_cast<int>(ScoreTilesBefore((rows + 63) / 64));
    // Summed over these sequences up to this lane's:
    int end = tiles;
    int end_pairs = pairs;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, step);
      const int before_pairs = __shfl_up_sync(kAllLanes, end_pairs, step);
      if (lane >= step) {
        end += before;
        end_pairs += before_pairs;
      }
    }
    const unsigned beyond = __ballot_sync(kAllLanes, end > index);
    if (beyond == 0) {
      index -= __shfl_sync(kAllLanes, end, 31);
      pairs_before += __shfl_sync(kAllLanes, end_pairs, 31);
      continue;
    }
    const int owner = __ffs(static_cast<int>(beyond)) - 1;
    work->first_pair = pairs_before + __shfl_sync(kAllLanes, end_pairs - pairs, owner);
    work->first_row = __shfl_sync(kAllLanes, begin, owner);
    work->length = __shfl_sync(kAllLanes, rows, owner);
    work->tile = index - __shfl_sync(kAllLanes, end - tiles, owner);
    return true;
  }
  return false;
}

// A ring of kSlots tiles of kSlotBytes each, with a barrier for full and one for empty slots each.
template <int kSlots, int kSlotBytes>
struct TileRing {
  uint32_t tiles;     // shared-memory address of the first slot
  uint32_t barriers;  // of the full slots, then of the empty ones

  static constexpr int kBarrierBytes = (2 * kSlots + 2) * 8;

  struct Cursor {
    int slot = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void Advance() {
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
  };

  __device__ __forceinline__ uint32_t Tile(int slot) const { return tiles + slot * kSlotBytes; }
  __device__ __forceinline__ uint32_t Full(int slot) const { return barriers + slot * 8; }
  __device__ __forceinline__ uint32_t Empty(int slot) const {
    return barriers + (kSlots + slot) * 8;
  }
  // The barrier for a tile that needs clearing: it has arrived.
  __device__ __forceinline__ uint32_t Landed() const { return barriers + 2 * kSlots * 8; }
  // The barrier for what a block keeps outside the ring: it has arrived.
  __device__ __forceinline__ uint32_t Kept() const { return barriers + (2 * kSlots + 1) * 8; }

  __device__ __forceinline__ void Init(int full_arrivals, int empty_arrivals,
                                       int kept_arrivals) const {
    for (int slot = 0; slot < kSlots; ++slot) {
      InitBarrier(Full(slot), full_arrivals);
      InitBarrier(Empty(slot), empty_arrivals);
    }
    InitBarrier(Landed(), 1);
    InitBarrier(Kept(), kept_arrivals);
    FenceBarrierInit();
  }

  __device__ __forceinline__ void WaitFull(const Cursor& c) const {
    WaitBarrier(Full(c.slot), c.parity);
  }
  __device__ __forceinline__ void WaitEmpty(const Cursor& c) const {
    WaitBarrier(Empty(c.slot), c.parity ^ 1);
  }
  // Called by a consumer's warp once it no longer needs the slot.
  __device__ __forceinline__ void Release(int slot) const {
    if (threadIdx.x % 32 == 0) Arrive(Empty(slot));
  }
  // Called by a consumer that does not need the next `tiles`.
  __device__ __forceinline__ void PassOver(Cursor* c, int tiles) const {
    for (int i = 0; i < tiles; ++i, c->Advance()) {
      WaitFull(*c);
      Release(c->slot);
    }
  }
};

// Copies kRows rows of one head, from `row` on, to a tile. Run by one thread.
template <int kColumnBlocks, int kRows>
__device__ __forceinline__ void CopyTile(uint32_t to, const CUtensorMap& map, int32_t row,
                                         int32_t head, uint32_t barrier) {
  ExpectBytes(barrier, kColumnBlocks * kRows * 128);
#pragma unroll
  for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
    for (int r = 0; r < kRows; r += kBoxRows) {
      CopyHeadBox(to + (c * kRows + r) * 128, map, row + r, head, c * 64, barrier, kEvictNormal);
    }
  }
}

// Sets the rows from `valid` on of an arrived tile to +0. Run by one warp. Memory after the
// sequence's end may be NaN, which a weight of +0 does not cancel.
template <int kColumnBlocks, int kRows>
__device__ __forceinline__ void ClearRows(uint32_t tile, int valid) {
  for (int c = 0; c < kColumnBlocks; ++c) {
    for (int i = valid * 8 + static_cast<int>(threadIdx.x % 32); i < kRows * 8; i += 32) {
      asm volatile(
          "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + c * kRows * 128 + i * 16), "r"(0)
          : "memory");
    }
  }
  FenceSharedForAsync();
  __syncwarp();
}

// Fills the next slot of a ring with rows of one head. Run by one warp. `valid`: the number of rows
// that belong to the sequence; if it is below kRows, the other rows are cleared. parity: 1 if an
// odd number of tiles was cleared before.
template <int kColumnBlocks, int kRows, class Ring>
__device__ __forceinline__ void FillSlot(const Ring& ring, typename Ring::Cursor* cursor,
                                         const CUtensorMap& map, int32_t row, int32_t head,
                                         int valid, uint32_t parity) {
  ring.WaitEmpty(*cursor);
  const bool clear = valid < kRows;
  const uint32_t full = ring.Full(cursor->slot);
  if (threadIdx.x % 32 == 0) {
    CopyTile<kColumnBlocks, kRows>(ring.Tile(cursor->slot), map, row, head,
                                   clear ? ring.Landed() : full);
  }
  __syncwarp();
  if (clear) {
    WaitBarrier(ring.Landed(), parity);
    ClearRows<kColumnBlocks, kRows>(ring.Tile(cursor->slot), valid);
    if (threadIdx.x % 32 == 0) Arrive(full);
  }
  cursor->Advance();
}

// A tile of ds in memory. `head` counts from the launch's first head.
__device__ __forceinline__ std::byte* ScoreTile(const GradientParams& p, const SequenceTile& work,
                                                int head, int query_tile, int key_tile) {
  return p.score_gradients +
         (head * p.pairs + work.first_pair + ScoreTilesBefore(query_tile) + key_tile) *
             kScoreTileBytes;
}

// d = A B^T over kColumns columns. a, b: K-major operands in blocks of 64 columns, which are
// a_block_bytes and b_block_bytes apart.
template <int kN, int kColumns>
__device__ __forceinline__ void MultiplyColumns(float (&d)[kN / 2], uint64_t a, int a_block_bytes,
                                                uint64_t b, int b_block_bytes) {
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    Wgmma<kN>::Mma(d, Further(a, k / 4 * a_block_bytes + k % 4 * 32),
                   Further(b, k / 4 * b_block_bytes + k % 4 * 32), k != 0);
  }
  CommitMma();
}

// Turns scores into weights (contract::AttentionWeight). log_sum(i): L of element i's row.
// `bounded`: all |L| are below 2^29, so exp2's argument exceeds 0 by at most L's rounding error.
template <int n, typename LogSum>
__device__ __forceinline__ void Weigh(float (&scores)[n], float scale, bool bounded,
                                      LogSum log_sum) {
  constexpr int kBatch = 8;
  if (__builtin_expect(bounded, 1)) {
#pragma unroll
    for (int k = 0; k < n; k += kBatch) {
      float x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) x[i] = contract::Fma(scores[k + i], scale, -log_sum(k + i));
      BoundedExp2(x);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) scores[k + i] = x[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      scores[i] = contract::AttentionWeight(scores[i], scale, log_sum(i));
    }
  }
}

// Packs a fragment into the A operands of its k16 steps.
template <int n>
__device__ __forceinline__ void PackFragment(const float (&x)[n], uint32_t (&packed)[n / 8][4]) {
#pragma unroll
  for (int i = 0; i < n / 2; ++i) packed[i / 4][i % 4] = PackBf16(x[2 * i], x[2 * i + 1]);
}

// Multiplies a warpgroup's accumulators, 64 rows, by `factor`, rounds to bf16 and writes them to a
// tile of kRows rows, from the tile's row `first` on.
template <int kRows, int n>
__device__ __forceinline__ void PutFragment(const float (&acc)[n], float factor, uint8_t* tile,
                                            int first) {
  const int thread = static_cast<int>(threadIdx.x % 128);
  const int r = first + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < n; i += 4) {
    uint8_t* const to =
        tile + i / 32 * (kRows * 128) + r * 128 + ((i / 4 % 8) ^ (r % 8)) * 16 + thread % 4 * 4;
    using contract::Mul;
    *reinterpret_cast<uint32_t*>(to) = PackBf16(Mul(acc[i], factor), Mul(acc[i + 1], factor));
    *reinterpret_cast<uint32_t*>(to + 8 * 128) =
        PackBf16(Mul(acc[i + 2], factor), Mul(acc[i + 3], factor));
  }
}

// Copies rows [first, first + count) of such a tile to `out`, whose rows are ld elements apart. Run
// by one warpgroup.
template <int kColumnBlocks, int kRows>
__device__ __forceinline__ void StoreRows(const uint8_t* tile, int first, int count, int head_dim,
                                          Bf16* out, int64_t ld) {
  constexpr int kChunks = kColumnBlocks * 8;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x % 128); i < 64 * kChunks; i += 128) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    if (row >= count || chunk * 8 >= head_dim) continue;
    const int r = first + row;
    *reinterpret_cast<uint4*>(out + row * ld + chunk * 8) = *reinterpret_cast<const uint4*>(
        tile + chunk / 8 * (kRows * 128) + r * 128 + ((chunk % 8) ^ (r % 8)) * 16);
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_CUH_
