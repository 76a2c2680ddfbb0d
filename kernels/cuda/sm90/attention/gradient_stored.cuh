// The kernel of dQ that reads ds, which the kernel of dK and dV has written to memory: one product,
// limited by the speed of the copies. A block takes query rows of one head, 64 for each consumer
// warpgroup, and the keys from the last to the first, as the contract's chain does.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_STORED_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_STORED_CUH_

#include <cstdint>

#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/sm90/attention/gradient.cuh"
#include "kernels/cuda/sm90/attention/gradient_queries.cuh"
#include "kernels/cuda/sm90/device/shared_memory.h"

namespace isobit::cuda {

template <int kHeadDim>
struct StoredGradientShape {
  static constexpr int kColumns = kHeadDim;
  static constexpr int kColumnBlocks = (kHeadDim + 63) / 64;
  static constexpr int kConsumers = 2;
  static constexpr int kQueries = 64 * kConsumers;        // of a block
  static constexpr int kThreads = 128 * kConsumers + 32;  // the last warp copies
  static constexpr int kBlocks = kHeadDim > 128 ? 1 : 2;  // per multiprocessor

  // A slot has 64 keys, then a tile of ds for each consumer.
  static constexpr int kKeyBytes = kColumnBlocks * 64 * 128;
  static constexpr int kSlotBytes = kKeyBytes + kConsumers * kScoreTileBytes;
  static constexpr int kSlots = kHeadDim > 128 ? 4 : kHeadDim > 64 ? 3 : 4;
  static constexpr int kBarriers = kSlots * kSlotBytes;
  using Ring = TileRing<kSlots, kSlotBytes>;
  static constexpr int kSharedBytes = kBarriers + Ring::kBarrierBytes;
  static_assert(kBlocks * (kSharedBytes + kReservedSharedBytes) <= kMultiprocessorSharedBytes);
  // The results are written through the first slots.
  static_assert(kConsumers * kKeyBytes <= kSlots * kSlotBytes);
};

// The tiles of 64 keys that the queries of tile `query_tile` (64 rows) see: [first, end).
struct KeyRange {
  int first;
  int end;
};
__device__ __forceinline__ KeyRange KeysOf(const GradientParams& p, int length, int query_tile) {
  if (query_tile * 64 >= length) return {query_tile, query_tile};
  return {FirstKey(p, query_tile * 64) / 64, query_tile + 1};
}

// Run by one warp.
template <class Shape>
__device__ __forceinline__ void CopyScores(const GradientParams& p, const QueryWork& work,
                                           const typename Shape::Ring& ring) {
  const int kv_head = work.head / p.heads_per_kv;
  const int head = work.head - p.first_kv_head * p.heads_per_kv;
  const int length = work.queries.length;
  const int first_tile = work.queries.tile * Shape::kConsumers;
  KeyRange ranges[Shape::kConsumers];
  for (int c = 0; c < Shape::kConsumers; ++c) ranges[c] = KeysOf(p, length, first_tile + c);
  typename Shape::Ring::Cursor cursor;
  for (int tile = work.end_tile - 1; tile >= work.first_tile; --tile, cursor.Advance()) {
    const uint32_t slot = ring.Tile(cursor.slot);
    const uint32_t full = ring.Full(cursor.slot);
    const int valid = length - tile * 64;
    const bool clear = valid < 64;
    ring.WaitEmpty(cursor);
    if (threadIdx.x % 32 == 0) {
      CopyTile<Shape::kColumnBlocks, 64>(slot, p.k_map, work.queries.first_row + tile * 64, kv_head,
                                         clear ? ring.Landed() : full);
      int count = 0;
      for (const KeyRange& r : ranges) count += tile >= r.first && tile < r.end ? 1 : 0;
      ExpectBytes(full, count * kScoreTileBytes);
      for (int c = 0; c < Shape::kConsumers; ++c) {
        if (tile < ranges[c].first || tile >= ranges[c].end) continue;
        CopyBytes(slot + Shape::kKeyBytes + c * kScoreTileBytes,
                  ScoreTile(p, work.queries, head, first_tile + c, tile), kScoreTileBytes, full,
                  kEvictFirst);
      }
    }
    __syncwarp();
    if (!clear) continue;
    WaitBarrier(ring.Landed(), 0);
    ClearRows<Shape::kColumnBlocks, 64>(slot, valid);
    if (threadIdx.x % 32 == 0) Arrive(full);
  }
}

// One consumer warpgroup: the chains of 64 queries.
template <class Shape>
__device__ __forceinline__ void ConsumeScores(const GradientParams& p, const QueryWork& work,
                                              const typename Shape::Ring& ring, uint8_t* shared,
                                              int consumer) {
  constexpr int kColumns = Shape::kColumns;
  const int length = work.queries.length;
  const int query_tile = work.queries.tile * Shape::kConsumers + consumer;
  const KeyRange keys = KeysOf(p, length, query_tile);
  const int first = Uniform(min(keys.first, int{work.end_tile}));
  const int end = Uniform(min(keys.end, int{work.end_tile}));
  float dq[kColumns / 2] = {};
  typename Shape::Ring::Cursor cursor;
  ring.PassOver(&cursor, work.end_tile - end);
  int before = -1;
  for (int tile = end - 1; tile >= first; --tile) {
    const int slot = cursor.slot;
    ring.WaitFull(cursor);
    cursor.Advance();
    const uint64_t scores = TransposedOperand(
        ring.Tile(slot) + Shape::kKeyBytes + consumer * kScoreTileBytes, kScoreTileBytes);
    const uint64_t k = TransposedOperand(ring.Tile(slot), kBoxBytes);
    FenceMma();
#pragma unroll
    for (int step = 3; step >= 0; --step) {
      Wgmma<kColumns>::template MajorMma<true, true>(dq, Further(scores, step * 16 * 128),
                                                     Further(k, step * 16 * 128), true);
    }
    CommitMma();
    WaitMma<1>();
    if (before >= 0) ring.Release(before);
    before = slot;
  }
  WaitMma<0>();
  if (before >= 0) ring.Release(before);
  ring.PassOver(&cursor, first - work.first_tile);

  // The gradient is written through the ring, once all warps have read it.
  SyncThreads(1, 128 * Shape::kConsumers);
  uint8_t* const out = shared + consumer * Shape::kKeyBytes;
  PutFragment<64>(dq, p.gradient_scale, out, 0);
  SyncThreads(2 + consumer, 128);
  const int first_query = query_tile * 64;
  const int64_t ld = int64_t{p.kv_heads} * p.heads_per_kv * p.head_dim;
  StoreRows<Shape::kColumnBlocks, 64>(
      out, 0, length - first_query, p.head_dim,
      p.dq + (int64_t{work.queries.first_row} + first_query) * ld + work.head * p.head_dim, ld);
}

template <int kHeadDim>
__global__ void __launch_bounds__(StoredGradientShape<kHeadDim>::kThreads,
                                  StoredGradientShape<kHeadDim>::kBlocks)
    StoredGradientKernel(const __grid_constant__ GradientParams p) {
  using Shape = StoredGradientShape<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = SharedAddress(shared);
  const typename Shape::Ring ring = {base, base + Shape::kBarriers};
  const int warpgroup = Uniform(static_cast<int>(threadIdx.x) / 128);

  WaitForPredecessor();
  ReleaseSuccessor();
  QueryWork work;
  // The last tiles come first, because they take longest.
  const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int heads = p.launch_kv_heads * p.heads_per_kv;
  work.head = p.first_kv_head * p.heads_per_kv + index % heads;
  if (!FindTile(p, Shape::kQueries, index / heads, &work.queries)) return;
  const int first_query = work.queries.tile * Shape::kQueries;
  work.first_tile = FirstKey(p, first_query) / 64;
  work.end_tile = (min(first_query + Shape::kQueries, work.queries.length) - 1) / 64 + 1;
  if (threadIdx.x == 0) ring.Init(2, 4 * Shape::kConsumers, 1);
  __syncthreads();

  if (warpgroup < Shape::kConsumers) {
    ConsumeScores<Shape>(p, work, ring, shared, warpgroup);
  } else {
    CopyScores<Shape>(p, work, ring);
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_STORED_CUH_
