// The prefill kernel's work, and the warps that load keys and values into shared memory. Not here:
// the arithmetic (prefill.cuh).
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_PREFILL_RING_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_PREFILL_RING_CUH_

#include <cuda.h>

#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/device_sequences.h"
#include "kernels/cuda/sm90/attention/softmax_fragment.cuh"
#include "kernels/cuda/sm90/device/barrier.cuh"
#include "kernels/cuda/sm90/device/bulk_copy.cuh"
#include "kernels/cuda/sm90/device/shared_memory.h"

namespace isobit::cuda {

// The kernel's parameters, passed by value.
struct PrefillParams {
  CUtensorMap k_map;  // unused if box_rows is 0
  CUtensorMap v_map;
  const Bf16* q;
  const Bf16* k;
  const Bf16* v;
  Bf16* out;
  int64_t ldq;
  int64_t ldo;
  DeviceSequences sequences;
  int32_t min_rows;
  int32_t heads_per_kv;  // query heads that share a KV head
  // 2^32 / heads_per_kv, rounded up (0 for 1): divides x < 2^16 by multiplying.
  uint32_t inverse_heads_per_kv;
  int32_t kv_heads;
  int32_t page_size;
  int32_t box_rows;  // rows of the cache that one box copies; 0: gather without boxes
  int32_t window;    // 0: none
  float scale;
  bool q_vectors;    // q and ldq are multiples of 16 bytes
  bool out_vectors;  // likewise for out
  // Only for KvSource::kRows:
  int32_t head_dim;  // at most the schedule's; columns beyond it count as +0
  int64_t rows;
  float* log_sums;  // [heads, rows]
};

// Where the keys and values of a sequence are.
enum class KvSource {
  kBoxes,   // in pages that boxes can copy
  kGather,  // in pages of any size
  kRows,    // in the sequence's own rows of tensors [rows, kv_heads * head_dim] (training)
};

// The schedule's sizes for one head size.
template <int kHeadDim>
struct PrefillShape {
  static constexpr int kTile = contract::KvTile(kHeadDim);
  static constexpr int kTilesOfSplit = contract::kSplit / kTile;
  static constexpr int kColumnBlocks = (kHeadDim + 63) / 64;  // of 64 columns: 128 bytes per row
  // The instructions of a warp form long chains. Three consumers, each of which waits for its
  // products, keep the GPU busier than two whose products overlap with their softmax.
  static constexpr int kConsumers = kHeadDim == 256 ? 2 : 3;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = kHeadDim == 64 ? 2 : 1;
  // A thread's registers, as setmaxnreg assigns them.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr int kAccumulators = kHeadDim / 2;
  // The number of a thread's accumulators whose folded results are in shared memory; the others'
  // are in registers. If there is room, it is all of them: the registers that this frees let the
  // compiler interleave the exponentials.
  static constexpr int kSharedTotals = kHeadDim == 256 ? 96 : kAccumulators;
  static constexpr int kRegisterTotals = kAccumulators - kSharedTotals;

  // Offsets and sizes in shared memory.
  static constexpr int kQueryBlockBytes = 64 * 128;
  static constexpr int kQueryBytes = kColumnBlocks * kQueryBlockBytes;  // of one consumer
  static constexpr int kTileBlockBytes = kTile * 128;
  static constexpr int kTileBytes = kColumnBlocks * kTileBlockBytes;
  static constexpr int kKeys = kConsumers * kQueryBytes;
  static constexpr int kValues = kKeys + kStages * kTileBytes;
  static constexpr int kTotals = kValues + kStages * kTileBytes;
  static constexpr int kTotalBytes = kSharedTotals * 128 * 4;  // of one consumer
  static constexpr int kBarriers = kTotals + kConsumers * kTotalBytes;
  static constexpr int kSharedBytes = kBarriers + (4 * kStages + 1) * 8;
  static_assert(kSharedBytes <= kBlockSharedBytes);
};

// Returns x, which is equal in all lanes of the warp, in a form that tells the compiler so.
__device__ __forceinline__ int Uniform(int x) { return __shfl_sync(kAllLanes, x, 0); }

// A block's work.
struct PrefillBlock {
  int32_t kv_head;
  int32_t sequence;
  int32_t first_row;       // of the sequence
  int32_t first_position;  // of that row
  int32_t first_pair;      // (token, head) pairs [first_pair, end_pair) of the sequence
  int32_t end_pair;
  int32_t end_position;  // positions of the sequence
  int32_t first_tile;    // of keys that the block's rows see
  int32_t end_tile;

  __device__ __forceinline__ int32_t PositionOf(int32_t pair, int32_t heads_per_kv) const {
    return first_position + pair / heads_per_kv;
  }
};

// Finds this block's work. False: there is none. A sequence's last tokens get its first blocks,
// because they take longest.
template <class Shape, KvSource kSource>
__device__ __forceinline__ bool FindWork(const PrefillParams& p, PrefillBlock* work) {
  const DeviceSequences& s = p.sequences;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int index = static_cast<int>(blockIdx.x);
  work->kv_head = index % p.kv_heads;
  int item = index / p.kv_heads;
  for (int first = 0; first < s.num_sequences; first += 32) {
    const int sequence = first + lane;
    int rows = 0;
    if (sequence < s.num_sequences) rows = s.first_row[sequence + 1] - s.first_row[sequence];
    const int blocks =
        rows < p.min_rows ? 0 : (rows * p.heads_per_kv + Shape::kRows - 1) / Shape::kRows;
    int end = blocks;  // the blocks of these sequences up to this lane's
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, step);
      if (lane >= step) end += before;
    }
    const unsigned beyond = __ballot_sync(kAllLanes, end > item);
    if (beyond == 0) {
      item -= __shfl_sync(kAllLanes, end, 31);
      continue;
    }
    const int owner = __ffs(static_cast<int>(beyond)) - 1;
    const int block = __shfl_sync(kAllLanes, end, owner) - 1 - item;
    const int pairs = __shfl_sync(kAllLanes, rows, owner) * p.heads_per_kv;
    work->sequence = first + owner;
    work->first_row = s.first_row[work->sequence];
    work->first_position = kSource == KvSource::kRows ? 0 : s.first_position[work->sequence];
    work->first_pair = block * Shape::kRows;
    work->end_pair = min(pairs, work->first_pair + Shape::kRows);
    work->end_position = work->first_position + pairs / p.heads_per_kv;
    const int first_seen =
        p.window == 0 ? 0
                      : max(0, work->PositionOf(work->first_pair, p.heads_per_kv) - p.window + 1);
    work->first_tile = first_seen / Shape::kTile;
    work->end_tile = work->PositionOf(work->end_pair - 1, p.heads_per_kv) / Shape::kTile + 1;
    return true;
  }
  return false;
}

// Shared-memory addresses of the ring and its barriers.
template <class Shape>
struct PrefillRing {
  uint32_t base;

  __device__ __forceinline__ uint32_t Keys(int stage) const {
    return base + Shape::kKeys + stage * Shape::kTileBytes;
  }
  __device__ __forceinline__ uint32_t Values(int stage) const {
    return base + Shape::kValues + stage * Shape::kTileBytes;
  }
  __device__ __forceinline__ uint32_t Barrier(int index) const {
    return base + Shape::kBarriers + index * 8;
  }
  __device__ __forceinline__ uint32_t KeysFull(int stage) const { return Barrier(stage); }
  __device__ __forceinline__ uint32_t ValuesFull(int stage) const {
    return Barrier(Shape::kStages + stage);
  }
  __device__ __forceinline__ uint32_t KeysEmpty(int stage) const {
    return Barrier(2 * Shape::kStages + stage);
  }
  __device__ __forceinline__ uint32_t ValuesEmpty(int stage) const {
    return Barrier(3 * Shape::kStages + stage);
  }
  // The last tile's values have arrived. The rows after the sequence's end are then set to +0.
  __device__ __forceinline__ uint32_t ValuesLanded() const { return Barrier(4 * Shape::kStages); }
};

// A cursor into the ring, with the parity of its barriers' current phase.
template <class Shape>
struct RingCursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == Shape::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Fills the ring's keys (or values, if kOfValues) by box copies. Run by one warp. A lane copies the
// boxes of one run of positions; with kRows, the first lane copies whole tiles.
template <class Shape, bool kOfValues, KvSource kSource>
__device__ __forceinline__ void CopyTiles(const PrefillParams& p, const PrefillBlock& work,
                                          const PrefillRing<Shape>& ring) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  constexpr bool kOfRows = kSource == KvSource::kRows;
  const int32_t* pages = nullptr;
  if (!kOfRows) pages = p.sequences.pages + p.sequences.first_page[work.sequence];
  const CUtensorMap& map = kOfValues ? p.v_map : p.k_map;
  RingCursor<Shape> cursor;
  for (int tile = work.first_tile; tile < work.end_tile; ++tile, cursor.Advance()) {
    const int position = tile * Shape::kTile + lane * p.box_rows;
    const bool mine = lane * p.box_rows < Shape::kTile && position < work.end_position;
    int row = 0;  // of the cache
    if (kOfRows) {
      row = work.first_row + position;
    } else if (mine) {
      row = (pages[position / p.page_size] * p.kv_heads + work.kv_head) * p.page_size +
            position % p.page_size;
    }
    const int boxes = __popc(__ballot_sync(kAllLanes, mine));
    const int valid = work.end_position - tile * Shape::kTile;  // rows before the sequence's end
    const bool clear = kOfValues && valid < Shape::kTile;
    const uint32_t to = kOfValues ? ring.Values(cursor.stage) : ring.Keys(cursor.stage);
    const uint32_t full = kOfValues ? ring.ValuesFull(cursor.stage) : ring.KeysFull(cursor.stage);
    const uint32_t landed = clear ? ring.ValuesLanded() : full;

    WaitBarrier(kOfValues ? ring.ValuesEmpty(cursor.stage) : ring.KeysEmpty(cursor.stage),
                cursor.parity ^ 1);
    if (lane == 0) ExpectBytes(landed, boxes * p.box_rows * 128 * Shape::kColumnBlocks);
    __syncwarp();
    if (mine) {
      for (int c = 0; c < Shape::kColumnBlocks; ++c) {
        const uint32_t to_box = to + c * Shape::kTileBlockBytes + lane * p.box_rows * 128;
        if (kOfRows) {
          CopyHeadBox(to_box, map, row, work.kv_head, c * 64, landed, kEvictNormal);
        } else {
          CopyBox(to_box, map, row, c * 64, landed, kEvictNormal);
        }
      }
    }
    __syncwarp();
    if (!clear) continue;
    // Memory after the sequence's end may be NaN, which a weight of +0 does not cancel.
    WaitBarrier(landed, 0);
    for (int c = 0; c < Shape::kColumnBlocks; ++c) {
      for (int i = valid * 8 + lane; i < Shape::kTile * 8; i += 32) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                         to + c * Shape::kTileBlockBytes + i * 16),
                     "r"(0)
                     : "memory");
      }
    }
    FenceSharedForAsync();
    __syncwarp();
    if (lane == 0) Arrive(full);
  }
}

// Fills the ring by 16 bytes at a time, for page sizes that boxes cannot copy. Run by one
// warpgroup. What is after the sequence's end becomes +0.
template <class Shape, int kHeadDim>
__device__ __forceinline__ void GatherTiles(const PrefillParams& p, const PrefillBlock& work,
                                            const PrefillRing<Shape>& ring) {
  constexpr int kWarpSlots = Shape::kTile / 4;  // of a tile's keys, one warp's
  constexpr int kChunks = kHeadDim / 8;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int first_slot = static_cast<int>(threadIdx.x) / 32 * kWarpSlots;
  const int32_t* pages = p.sequences.pages + p.sequences.first_page[work.sequence];
  RingCursor<Shape> cursor;
  for (int tile = work.first_tile; tile < work.end_tile; ++tile, cursor.Advance()) {
    const int position = tile * Shape::kTile + first_slot + lane;
    int my_row = -1;  // of the cache, for the slot of this lane
    if (lane < kWarpSlots && position < work.end_position) {
      my_row = (pages[position / p.page_size] * p.kv_heads + work.kv_head) * p.page_size +
               position % p.page_size;
    }
    const auto gather = [&](uint32_t to, const Bf16* from) {
#pragma unroll 1  // this warpgroup has few registers
      for (int i = lane; i < kWarpSlots * kChunks; i += 32) {
        const int slot = first_slot + i / kChunks;
        const int chunk = i % kChunks;
        const int row = __shfl_sync(kAllLanes, my_row, i / kChunks);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                         to + chunk / 8 * Shape::kTileBlockBytes + slot * 128 +
                         ((chunk % 8) ^ (slot % 8)) * 16),
                     "l"(from + int64_t{max(row, 0)} * kHeadDim + chunk * 8), "r"(row < 0 ? 0 : 16)
                     : "memory");
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
    WaitBarrier(ring.KeysEmpty(cursor.stage), cursor.parity ^ 1);
    gather(ring.Keys(cursor.stage), p.k);
    WaitBarrier(ring.ValuesEmpty(cursor.stage), cursor.parity ^ 1);
    gather(ring.Values(cursor.stage), p.v);
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    FenceSharedForAsync();
    Arrive(ring.KeysFull(cursor.stage));
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    FenceSharedForAsync();
    Arrive(ring.ValuesFull(cursor.stage));
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_PREFILL_RING_CUH_
