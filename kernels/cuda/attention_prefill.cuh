// The kernel behind LaunchPrefillAttention, for one head size.
//
// A block takes 64 rows for each consumer warpgroup, all of one sequence and one KV head; a row is
// a (token, query head of the KV head's group) pair, tokens outermost. One more warpgroup copies
// tiles of keys and values into a ring. A consumer holds its scores, the accumulators of the split
// under way in registers, and the folded result of earlier splits in shared memory. While one
// consumer weighs its scores, others have the tensor cores.
#ifndef ISOBIT_KERNELS_CUDA_ATTENTION_PREFILL_CUH_
#define ISOBIT_KERNELS_CUDA_ATTENTION_PREFILL_CUH_

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "absl/status/status.h"
#include "kernels/contract/attention.h"
#include "kernels/cuda/device/barrier.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/softmax_fragment.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/sequences.h"
#include "kernels/ops.h"

namespace isobit::cuda {

// What the kernel is told, by value.
struct PrefillParams {
  CUtensorMap k_map;  // unused where box_rows is 0
  CUtensorMap v_map;
  const Bf16* q;
  const Bf16* k;
  const Bf16* v;
  Bf16* out;
  int64_t ldq;
  int64_t ldo;
  DeviceSequences sequences;
  int32_t min_rows;
  int32_t group;           // query heads of one KV head
  uint32_t inverse_group;  // 2^32 / group, rounded up (0 for 1): divides x < 2^16 by multiplying
  int32_t kv_heads;
  int32_t page_size;
  int32_t box_rows;  // rows of the cache that one box copies; 0: no boxes, but a gather
  int32_t window;    // 0: none
  float scale;
  bool q_vectors;    // q and ldq are multiples of 16 bytes
  bool out_vectors;  // likewise out
};

// The schedule's sizes for one head size.
template <int kHeadDim>
struct PrefillShape {
  static constexpr int kTile = contract::KvTile(kHeadDim);
  static constexpr int kTilesOfSplit = contract::kSplit / kTile;
  static constexpr int kColumnBlocks = (kHeadDim + 63) / 64;  // of 64 columns: 128 bytes a row
  // A warp's own instructions depend closely on one another: three consumers, each waiting for its
  // products, keep the GPU busier than two whose products overlap with their softmax.
  static constexpr int kConsumers = kHeadDim == 256 ? 2 : 3;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = kHeadDim == 64 ? 2 : 1;
  // Registers of a thread, as setmaxnreg deals them out.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr int kAccumulators = kHeadDim / 2;
  // How many of a thread's accumulators keep their folded result in shared memory, the others in
  // registers. All of them, where there is room: what registers are left over lets the compiler
  // interleave the exponentials.
  static constexpr int kSharedTotals = kHeadDim == 256 ? 96 : kAccumulators;
  static constexpr int kRegisterTotals = kAccumulators - kSharedTotals;

  // Shared memory, from its start.
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
  static_assert(kSharedBytes <= 227 * 1024);
};

// A value that a warp's lanes share, so that the compiler knows it.
__device__ __forceinline__ int Uniform(int x) { return __shfl_sync(kAllLanes, x, 0); }

// The same value. `hidden`: from the compiler, which else keeps what follows from it in registers
// through a loop that needs them all.
template <bool hidden>
__device__ __forceinline__ uint32_t Afresh(uint32_t x) {
  if constexpr (!hidden) return x;
  asm volatile("" : "+r"(x));
  return static_cast<uint32_t>(Uniform(static_cast<int>(x)));
}

// What a block works on.
struct PrefillBlock {
  int32_t kv_head;
  int32_t sequence;
  int32_t first_row;       // of the sequence
  int32_t first_position;  // of that row
  int32_t first_pair;      // (token, head) pairs [first_pair, end_pair) of the sequence
  int32_t end_pair;
  int32_t end_position;  // positions of the sequence
  int32_t first_tile;    // tiles of keys that the block's rows see
  int32_t end_tile;

  __device__ __forceinline__ int32_t PositionOf(int32_t pair, int32_t group) const {
    return first_position + pair / group;
  }
};

// Finds this block's work; false: there is none. Blocks of a sequence come last tokens first, for
// these take longest.
template <class Shape>
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
    const int blocks = rows < p.min_rows ? 0 : (rows * p.group + Shape::kRows - 1) / Shape::kRows;
    int end = blocks;  // blocks of these sequences up to this lane's
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
    const int pairs = __shfl_sync(kAllLanes, rows, owner) * p.group;
    work->sequence = first + owner;
    work->first_row = s.first_row[work->sequence];
    work->first_position = s.first_position[work->sequence];
    work->first_pair = block * Shape::kRows;
    work->end_pair = min(pairs, work->first_pair + Shape::kRows);
    work->end_position = work->first_position + pairs / p.group;
    const int first_seen =
        p.window == 0 ? 0 : max(0, work->PositionOf(work->first_pair, p.group) - p.window + 1);
    work->first_tile = first_seen / Shape::kTile;
    work->end_tile = work->PositionOf(work->end_pair - 1, p.group) / Shape::kTile + 1;
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
  // The last values have landed, before the rows after the sequence's end become +0.
  __device__ __forceinline__ uint32_t ValuesLanded() const { return Barrier(4 * Shape::kStages); }
};

// A place in the ring, and the parity of its barriers' current phase.
template <class Shape>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == Shape::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Fills the ring's keys, or its values, by boxes; run by one warp. A lane copies the boxes of one
// run of positions.
template <class Shape, bool kOfValues>
__device__ __forceinline__ void CopyTiles(const PrefillParams& p, const PrefillBlock& work,
                                          const PrefillRing<Shape>& ring) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int32_t* pages = p.sequences.pages + p.sequences.first_page[work.sequence];
  const CUtensorMap& map = kOfValues ? p.v_map : p.k_map;
  RingPlace<Shape> place;
  for (int tile = work.first_tile; tile < work.end_tile; ++tile, place.Advance()) {
    const int position = tile * Shape::kTile + lane * p.box_rows;
    const bool mine = lane * p.box_rows < Shape::kTile && position < work.end_position;
    int row = 0;  // of the cache
    if (mine) {
      row = (pages[position / p.page_size] * p.kv_heads + work.kv_head) * p.page_size +
            position % p.page_size;
    }
    const int boxes = __popc(__ballot_sync(kAllLanes, mine));
    const int valid = work.end_position - tile * Shape::kTile;  // rows before the sequence's end
    const bool clear = kOfValues && valid < Shape::kTile;
    const uint32_t to = kOfValues ? ring.Values(place.stage) : ring.Keys(place.stage);
    const uint32_t full = kOfValues ? ring.ValuesFull(place.stage) : ring.KeysFull(place.stage);
    const uint32_t landed = clear ? ring.ValuesLanded() : full;

    WaitBarrier(kOfValues ? ring.ValuesEmpty(place.stage) : ring.KeysEmpty(place.stage),
                place.parity ^ 1);
    if (lane == 0) ExpectBytes(landed, boxes * p.box_rows * 128 * Shape::kColumnBlocks);
    __syncwarp();
    if (mine) {
      for (int c = 0; c < Shape::kColumnBlocks; ++c) {
        CopyBox(to + c * Shape::kTileBlockBytes + lane * p.box_rows * 128, map, row, c * 64, landed,
                kEvictNormal);
      }
    }
    __syncwarp();
    if (!clear) continue;
    // What lies after the sequence's end may be NaN, which a weight of +0 does not cancel.
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

// Fills the ring 16 bytes at a time, for page sizes without boxes; run by a warpgroup. What lies
// after the sequence's end becomes +0.
template <class Shape, int kHeadDim>
__device__ __forceinline__ void GatherTiles(const PrefillParams& p, const PrefillBlock& work,
                                            const PrefillRing<Shape>& ring) {
  constexpr int kWarpSlots = Shape::kTile / 4;  // of a tile's keys, one warp's
  constexpr int kChunks = kHeadDim / 8;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int first_slot = static_cast<int>(threadIdx.x) / 32 * kWarpSlots;
  const int32_t* pages = p.sequences.pages + p.sequences.first_page[work.sequence];
  RingPlace<Shape> place;
  for (int tile = work.first_tile; tile < work.end_tile; ++tile, place.Advance()) {
    const int position = tile * Shape::kTile + first_slot + lane;
    int my_row = -1;  // of the cache, for the slot of this lane
    if (lane < kWarpSlots && position < work.end_position) {
      my_row = (pages[position / p.page_size] * p.kv_heads + work.kv_head) * p.page_size +
               position % p.page_size;
    }
    const auto gather = [&](uint32_t to, const Bf16* from) {
#pragma unroll 2
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
    WaitBarrier(ring.KeysEmpty(place.stage), place.parity ^ 1);
    gather(ring.Keys(place.stage), p.k);
    WaitBarrier(ring.ValuesEmpty(place.stage), place.parity ^ 1);
    gather(ring.Values(place.stage), p.v);
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    FenceSharedForAsync();
    Arrive(ring.KeysFull(place.stage));
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    FenceSharedForAsync();
    Arrive(ring.ValuesFull(place.stage));
  }
}

// Values as the B operand of a product over keys: [keys, columns], under the 128-byte swizzle, in
// blocks of 64 columns.
__device__ __forceinline__ uint64_t ValueOperand(uint32_t address, uint32_t block_bytes) {
  return uint64_t{(address & 0x3ffffu) >> 4} | (uint64_t{block_bytes >> 4} << 16) |
         (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
}

// An operand that begins `bytes` further on. Only the low word changes, in 32-bit arithmetic.
__device__ __forceinline__ uint64_t Further(uint64_t operand, int bytes) {
  return (operand & 0xffffffff00000000ull) |
         (static_cast<uint32_t>(operand) + static_cast<uint32_t>(bytes / 16));
}

// Calls use(whether there is such a row, its row of q and out, column of its head, swizzled offset)
// for each 16 bytes of a consumer's 64 rows.
template <class Shape, int kHeadDim, typename Use>
__device__ __forceinline__ void ForEachChunk(const PrefillParams& p, const PrefillBlock& work,
                                             int consumer, Use use) {
  constexpr int kChunks = kHeadDim / 8;
  const int first_pair = work.first_pair + consumer * 64;
  const int first_token = first_pair / p.group;
  const int first_head = first_pair - first_token * p.group;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x % 128); i < 64 * kChunks; i += 128) {
    const int r = i / kChunks;
    const int chunk = i % kChunks;
    const int tokens =
        p.group == 1 ? r : static_cast<int>(__umulhi(first_head + r, p.inverse_group));
    const int head = work.kv_head * p.group + first_head + r - tokens * p.group;
    use(first_pair + r < work.end_pair, int64_t{work.first_row} + first_token + tokens,
        head * kHeadDim + chunk * 8,
        chunk / 8 * Shape::kQueryBlockBytes + r * 128 + ((chunk % 8) ^ (r % 8)) * 16);
  }
}

// One consumer warpgroup: 64 rows from start to end.
template <class Shape, int kHeadDim>
__device__ __forceinline__ void Consume(const PrefillParams& p, const PrefillBlock& work,
                                        const PrefillRing<Shape>& ring, uint8_t* shared,
                                        int consumer) {
  constexpr int kTile = Shape::kTile;
  constexpr int kAccumulators = Shape::kAccumulators;
  constexpr int kSharedTotals = Shape::kSharedTotals;
  constexpr bool kHidden = Shape::kRegisterTotals > 0;
  const int thread = static_cast<int>(threadIdx.x % 128);
  const int lane = thread % 32;
  uint8_t* const q_bytes = shared + consumer * Shape::kQueryBytes;
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) Arrive(barrier);
  };
  RingPlace<Shape> place;
  const auto pass_over = [&](int tiles) {
    for (int i = 0; i < tiles; ++i, place.Advance()) {
      WaitBarrier(ring.KeysFull(place.stage), place.parity);
      release(ring.KeysEmpty(place.stage));
      WaitBarrier(ring.ValuesFull(place.stage), place.parity);
      release(ring.ValuesEmpty(place.stage));
    }
  };
  const int first_pair = work.first_pair + consumer * 64;
  ForEachChunk<Shape, kHeadDim>(p, work, consumer,
                                [&](bool valid, int64_t row, int column, int offset) {
                                  const Bf16* from = p.q + row * p.ldq + column;
                                  uint4 data = {0, 0, 0, 0};
                                  if (valid && p.q_vectors) {
                                    data = *reinterpret_cast<const uint4*>(from);
                                  } else if (valid) {
                                    uint32_t* words = &data.x;
                                    for (int i = 0; i < 4; ++i)
                                      words[i] = from[2 * i] | uint32_t{from[2 * i + 1]} << 16;
                                  }
                                  *reinterpret_cast<uint4*>(q_bytes + offset) = data;
                                });
  float4* const shared_total =
      reinterpret_cast<float4*>(shared + Shape::kTotals + consumer * Shape::kTotalBytes) + thread;
  for (int i = 0; i < kSharedTotals / 4; ++i) shared_total[i * 128] = {0.0f, 0.0f, 0.0f, 0.0f};
  FenceSharedForAsync();
  SyncThreads(1 + consumer, 128);

  const int last_pair = min(work.end_pair, first_pair + 64) - 1;
  const int first_position = work.PositionOf(first_pair, p.group);
  const int last_position = work.PositionOf(last_pair, p.group);
  int position[2];
  for (int h = 0; h < 2; ++h) {
    position[h] =
        work.PositionOf(min(last_pair, first_pair + thread / 32 * 16 + lane / 4 + 8 * h), p.group);
  }

  // The tiles of which these rows see any key; those of the block's others are passed over.
  const int first_tile = Uniform(p.window == 0 ? 0 : max(0, first_position - p.window + 1) / kTile);
  const int end_tile = Uniform(last_position / kTile + 1);
  // Of these, the tiles [full_tile, full_end_tile) are seen whole by every row.
  const int full_tile =
      Uniform(p.window == 0 ? 0 : max(0, last_position - p.window + kTile) / kTile);
  const int full_end_tile = Uniform((first_position + 1) / kTile);
  pass_over(first_tile - Uniform(work.first_tile));

  SoftmaxFragment softmax;
  softmax.Reset();
  contract::SplitSum sum[2] = {{contract::kMinusInfinity, 0.0f}, {contract::kMinusInfinity, 0.0f}};
  float scores[kTile / 2];
  uint32_t weights[kTile / 16][4];
  float alpha[2];
  float acc[kAccumulators];
  float total[Shape::kRegisterTotals + 1] = {};

  const auto multiply_keys = [&](int stage) {
    const uint64_t q_operand =
        KMajorOperand(Afresh<kHidden>(ring.base + consumer * Shape::kQueryBytes));
    const uint64_t k_operand = KMajorOperand(Afresh<kHidden>(ring.Keys(stage)));
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const int step = k % 4 * 32;  // bytes of 16 columns
      Wgmma<kTile>::Mma(scores, Further(q_operand, k / 4 * Shape::kQueryBlockBytes + step),
                        Further(k_operand, k / 4 * Shape::kTileBlockBytes + step), k != 0);
    }
    CommitMma();
  };
  const auto multiply_values = [&](int stage, int tile) {
    const uint64_t v_operand =
        ValueOperand(Afresh<kHidden>(ring.Values(stage)), Shape::kTileBlockBytes);
    // A split's first tile starts from +0, as 0 * alpha would.
    const bool accumulate = tile != first_tile && tile % Shape::kTilesOfSplit != 0;
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      Wgmma<kHeadDim>::template RegisterMma<true>(acc, weights[k], Further(v_operand, k * 16 * 128),
                                                  accumulate || k != 0);
    }
    CommitMma();
  };
  const auto weigh = [&](int tile) {
    const int first_key = tile * kTile;
    float shift_of_none[2] = {contract::kMinusInfinity, contract::kMinusInfinity};
    if (__builtin_expect(tile < full_tile || tile >= full_end_tile, 0)) {
      SeenKeys seen;
      for (int h = 0; h < 2; ++h) {
        seen.upto[h] = position[h] - first_key;
        seen.after[h] = p.window == 0 ? -1 : seen.upto[h] - p.window;
        if (!seen.Any(h, kTile)) shift_of_none[h] = 0.0f;
      }
      SoftmaxFragment::Mask<kTile>(scores, seen);
    }
    softmax.Update<kTile>(scores, p.scale, shift_of_none, alpha);
  };
  contract::FoldFactors factors[2];
  bool skipped[2];  // the row sees no key of the split
  const auto finish_split = [&] {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const contract::SplitSum split = softmax.Finish(h, p.scale);
      skipped[h] = split.max == contract::kMinusInfinity;
      if (!skipped[h]) factors[h] = contract::Fold(sum[h], split);
    }
    softmax.Reset();
  };
  const auto fold_into = [&](auto fold_one) {
#pragma unroll
    for (int i = 0; i < kSharedTotals; i += 16) {
      float4 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = shared_total[(i / 4 + j) * 128];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = i + 4 * j;
        x[j] = {fold_one(x[j].x, e), fold_one(x[j].y, e + 1), fold_one(x[j].z, e + 2),
                fold_one(x[j].w, e + 3)};
        shared_total[(i / 4 + j) * 128] = x[j];
      }
    }
#pragma unroll
    for (int i = kSharedTotals; i < kAccumulators; ++i) {
      total[i - kSharedTotals] = fold_one(total[i - kSharedTotals], i);
    }
  };
  const auto fold = [&] {
    if (__builtin_expect(__any_sync(kAllLanes, skipped[0] || skipped[1]), 0)) {
      fold_into([&](float x, int i) {
        const int h = i / 2 % 2;
        return skipped[h] ? x : contract::FoldAccumulator(x, acc[i], factors[h]);
      });
    } else {
      fold_into(
          [&](float x, int i) { return contract::FoldAccumulator(x, acc[i], factors[i / 2 % 2]); });
    }
  };

  WaitBarrier(ring.KeysFull(place.stage), place.parity);
  FenceMma();
  multiply_keys(place.stage);
  WaitMma<0>();
  release(ring.KeysEmpty(place.stage));
  weigh(first_tile);
  SoftmaxFragment::Pack<kTile>(scores, weights);
  for (int tile = first_tile; tile + 1 < end_tile; ++tile) {
    const RingPlace<Shape> now = place;
    place.Advance();
    const bool split_ends = (tile + 1) % Shape::kTilesOfSplit == 0;
    WaitBarrier(ring.ValuesFull(now.stage), now.parity);
    FenceMma();
    multiply_values(now.stage, tile);
    if (split_ends) finish_split();
    WaitMma<0>();
    release(ring.ValuesEmpty(now.stage));
    if (split_ends) fold();
    WaitBarrier(ring.KeysFull(place.stage), place.parity);
    FenceMma();
    multiply_keys(place.stage);
    WaitMma<0>();
    release(ring.KeysEmpty(place.stage));
    weigh(tile + 1);
    if (!split_ends) {
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) acc[i] = contract::Mul(acc[i], alpha[i / 2 % 2]);
    }
    SoftmaxFragment::Pack<kTile>(scores, weights);
  }
  WaitBarrier(ring.ValuesFull(place.stage), place.parity);
  FenceMma();
  multiply_values(place.stage, end_tile - 1);
  finish_split();
  WaitMma<0>();
  release(ring.ValuesEmpty(place.stage));
  place.Advance();
  fold();
  pass_over(work.end_tile - end_tile);

  // The output goes through the place of q, which has been read.
  const float inverse[2] = {contract::Div(1.0f, sum[0].sum), contract::Div(1.0f, sum[1].sum)};
#pragma unroll
  for (int i = 0; i < kAccumulators; i += 4) {
    float4 x;
    if (i < kSharedTotals) {
      x = shared_total[i / 4 * 128];
    } else {
      const float* y = total + i - kSharedTotals;
      x = {y[0], y[1], y[2], y[3]};
    }
    const int r = thread / 32 * 16 + lane / 4;
    uint8_t* const to = q_bytes + i / 32 * Shape::kQueryBlockBytes + r * 128 +
                        ((i / 4 % 8) ^ (r % 8)) * 16 + lane % 4 * 4;
    using contract::Mul;
    *reinterpret_cast<uint32_t*>(to) = PackBf16(Mul(x.x, inverse[0]), Mul(x.y, inverse[0]));
    *reinterpret_cast<uint32_t*>(to + 8 * 128) =
        PackBf16(Mul(x.z, inverse[1]), Mul(x.w, inverse[1]));
  }
  SyncThreads(1 + consumer, 128);
  ForEachChunk<Shape, kHeadDim>(
      p, work, consumer, [&](bool valid, int64_t row, int column, int offset) {
        if (!valid) return;
        Bf16* to = p.out + row * p.ldo + column;
        if (p.out_vectors) {
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(q_bytes + offset);
        } else {
          for (int i = 0; i < 8; ++i) to[i] = reinterpret_cast<const Bf16*>(q_bytes + offset)[i];
        }
      });
}

template <int kHeadDim, bool kGather>
__global__ void __launch_bounds__(PrefillShape<kHeadDim>::kThreads, 1)
    PrefillKernel(const __grid_constant__ PrefillParams p) {
  using Shape = PrefillShape<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillRing<Shape> ring = {SharedAddress(shared)};
  const int warpgroup = Uniform(static_cast<int>(threadIdx.x) / 128);

  WaitForPredecessor();
  ReleaseSuccessor();
  PrefillBlock work;
  if (!FindWork<Shape>(p, &work)) return;
  const int consumers = (work.end_pair - work.first_pair + 63) / 64;  // with any row
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      InitBarrier(ring.KeysFull(stage), kGather ? 128 : 1);
      InitBarrier(ring.ValuesFull(stage), kGather ? 128 : 1);
      InitBarrier(ring.KeysEmpty(stage), 4 * consumers);
      InitBarrier(ring.ValuesEmpty(stage), 4 * consumers);
    }
    InitBarrier(ring.ValuesLanded(), 1);
    FenceBarrierInit();
  }
  __syncthreads();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kProducerRegisters));
    if (kGather) {
      GatherTiles<Shape, kHeadDim>(p, work, ring);
    } else if (threadIdx.x < 32) {
      CopyTiles<Shape, false>(p, work, ring);
    } else if (threadIdx.x < 64) {
      CopyTiles<Shape, true>(p, work, ring);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kConsumerRegisters));
    if (warpgroup <= consumers) Consume<Shape, kHeadDim>(p, work, ring, shared, warpgroup - 1);
  }
}

// Launches the schedule for one head size; instantiated in attention_prefill_<head size>.cu.
template <int kHeadDim>
absl::Status LaunchPrefill(const PrefillParams& params, const Stream& stream) {
  using Shape = PrefillShape<kHeadDim>;
  // At most: blocks that are full, and one more for each sequence's last.
  const int64_t pairs = int64_t{params.sequences.num_rows} * params.group;
  const int64_t blocks = (pairs / Shape::kRows + params.sequences.num_sequences) * params.kv_heads;
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(blocks)),
                     .threads = dim3(Shape::kThreads),
                     .shared_bytes = Shape::kSharedBytes};
  return params.box_rows == 0 ? Launch(PrefillKernel<kHeadDim, true>, grid, stream, params)
                              : Launch(PrefillKernel<kHeadDim, false>, grid, stream, params);
}
extern template absl::Status LaunchPrefill<64>(const PrefillParams&, const Stream&);
extern template absl::Status LaunchPrefill<96>(const PrefillParams&, const Stream&);
extern template absl::Status LaunchPrefill<128>(const PrefillParams&, const Stream&);
extern template absl::Status LaunchPrefill<256>(const PrefillParams&, const Stream&);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_ATTENTION_PREFILL_CUH_
