// The kernel of dQ. A block takes, for each consumer warpgroup, 64 queries of one head, and passes
// over their keys from the last to the first, as the contract's chain does.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_QUERIES_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_QUERIES_CUH_

#include <cstdint>

#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/sm90/attention/gradient.cuh"
#include "kernels/cuda/sm90/device/shared_memory.h"

namespace isobit::cuda {

template <int kHeadDim>
struct QueryGradientShape {
  static constexpr int kColumns = kHeadDim;
  static constexpr int kColumnBlocks = (kHeadDim + 63) / 64;
  static constexpr int kConsumers = 2;
  static constexpr int kQueries = 64 * kConsumers;  // of a block
  static constexpr int kKeys = 64;                  // of a tile
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kSlots = kHeadDim > 128 ? 3 : kHeadDim > 64 ? 8 : 16;

  static constexpr int kKeptBytes = kColumnBlocks * 64 * 128;  // 64 rows of q or dO
  static constexpr int kSlotBytes = kColumnBlocks * kKeys * 128;
  // Offsets in shared memory.
  static constexpr int kQ = 0;
  static constexpr int kDout = kConsumers * kKeptBytes;
  static constexpr int kTiles = 2 * kConsumers * kKeptBytes;
  static constexpr int kBarriers = kTiles + kSlots * kSlotBytes;
  using Ring = TileRing<kSlots, kSlotBytes>;
  static constexpr int kSharedBytes = kBarriers + Ring::kBarrierBytes;
  static_assert(kSharedBytes <= kBlockSharedBytes);
};

// A block's work. Slots have tiles of k and v in turn.
struct QueryWork {
  SequenceTile queries;
  int32_t head;
  int32_t first_tile;  // of the keys that a query of the block sees
  int32_t end_tile;
};

// The first key that the query at `position` sees.
__device__ __forceinline__ int FirstKey(const GradientParams& p, int position) {
  return p.window == 0 ? 0 : max(0, position - p.window + 1);
}

// Run by one warp.
template <class Shape>
__device__ __forceinline__ void CopyKeyTiles(const GradientParams& p, const QueryWork& work,
                                             const typename Shape::Ring& ring, uint32_t base) {
  constexpr int kBlocks = Shape::kColumnBlocks;
  const int first_query = work.queries.first_row + work.queries.tile * Shape::kQueries;
  if (threadIdx.x % 32 == 0) {
    for (int c = 0; c < Shape::kConsumers; ++c) {
      CopyTile<kBlocks, 64>(base + Shape::kQ + c * Shape::kKeptBytes, p.q_map, first_query + c * 64,
                            work.head, ring.Kept());
      CopyTile<kBlocks, 64>(base + Shape::kDout + c * Shape::kKeptBytes, p.dout_map,
                            first_query + c * 64, work.head, ring.Kept());
    }
  }
  __syncwarp();
  typename Shape::Ring::Cursor cursor;
  const int kv_head = work.head / p.heads_per_kv;
  for (int tile = work.end_tile - 1; tile >= work.first_tile; --tile) {
    const int row = work.queries.first_row + tile * Shape::kKeys;
    const int valid = work.queries.length - tile * Shape::kKeys;
    FillSlot<kBlocks, Shape::kKeys>(ring, &cursor, p.k_map, row, kv_head, valid, 0);
    FillSlot<kBlocks, Shape::kKeys>(ring, &cursor, p.v_map, row, kv_head, Shape::kKeys, 0);
  }
}

// One consumer warpgroup: the chains of 64 queries.
template <class Shape>
__device__ __forceinline__ void ConsumeKeys(const GradientParams& p, const QueryWork& work,
                                            const typename Shape::Ring& ring, uint8_t* shared,
                                            int consumer) {
  constexpr int kColumns = Shape::kColumns;
  constexpr int kKeys = Shape::kKeys;
  const int thread = static_cast<int>(threadIdx.x % 128);
  const int lane = thread % 32;
  const int length = work.queries.length;
  const int first_query = work.queries.tile * Shape::kQueries + consumer * 64;
  const int q_offset = Shape::kQ + consumer * Shape::kKeptBytes;
  const uint32_t base = SharedAddress(shared);

  // The tiles with a key that one of these queries sees. The block's other tiles are skipped.
  const bool any = first_query < length;
  const int first_tile = Uniform(any ? FirstKey(p, first_query) / kKeys : int{work.first_tile});
  const int end_tile = Uniform(any ? (min(first_query + 64, length) - 1) / kKeys + 1 : first_tile);
  // Every query sees every key of the tiles that begin at first_full or later and end before
  // first_query.
  const int first_full = Uniform(FirstKey(p, first_query + 63));
  const int position = first_query + thread / 32 * 16 + lane / 4;
  const bool bounded = *p.unbounded == 0;
  int first_key[2];
  float log_sum[2];
  float output_dot[2];
  for (int h = 0; h < 2; ++h) {
    const int query = min(position + 8 * h, length - 1);
    const int64_t at = int64_t{work.head} * p.rows + work.queries.first_row + query;
    first_key[h] = FirstKey(p, position + 8 * h);
    log_sum[h] = p.log_sums[at];
    output_dot[h] = p.output_dots[at];
  }

  float dq[kColumns / 2] = {};
  float s[kKeys / 2];
  float e[kKeys / 2];
  uint32_t ds_packed[kKeys / 16][4];
  typename Shape::Ring::Cursor cursor;
  // Whether the query of element i sees the element's key, in `tile`.
  const auto sees = [&](int tile, int i) {
    const int h = i / 2 % 2;
    const int key = i / 4 * 8 + i % 2;
    const int before = tile * kKeys + lane % 4 * 2;
    return (key <= position + 8 * h - before) & (key >= first_key[h] - before);
  };

  WaitBarrier(ring.Kept(), 0);
  ring.PassOver(&cursor, 2 * (work.end_tile - end_tile));
  int k_before = -1;
  for (int tile = end_tile - 1; tile >= first_tile; --tile) {
    const bool edge = tile * kKeys + kKeys > first_query || tile * kKeys < first_full;
    const typename Shape::Ring::Cursor k = cursor;
    cursor.Advance();
    const typename Shape::Ring::Cursor v = cursor;
    cursor.Advance();
    ring.WaitFull(k);
    FenceMma();
    MultiplyColumns<kKeys, kColumns>(s, KMajorOperand(base + q_offset), kBoxBytes,
                                     KMajorOperand(ring.Tile(k.slot)), kKeys * 128);
    // The product of the previous tile is done, so its keys' slot is free for later values.
    WaitMma<1>();
    if (k_before >= 0) ring.Release(k_before);
    k_before = k.slot;
    ring.WaitFull(v);
    FenceMma();
    MultiplyColumns<kKeys, kColumns>(
        e, KMajorOperand(base + Shape::kDout + consumer * Shape::kKeptBytes), kBoxBytes,
        KMajorOperand(ring.Tile(v.slot)), kKeys * 128);
    WaitMma<1>();
    Weigh(s, p.scale, bounded, [&](int i) { return log_sum[i / 2 % 2]; });
    WaitMma<0>();
    ring.Release(v.slot);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      e[i] = contract::Mul(s[i], contract::Sub(e[i], output_dot[i / 2 % 2]));
    }
    if (__builtin_expect(edge, 0)) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) e[i] = sees(tile, i) ? e[i] : 0.0f;
    }
    PackFragment(e, ds_packed);
    FenceMma();
    const uint64_t b = TransposedOperand(ring.Tile(k.slot), kKeys * 128);
#pragma unroll
    for (int step = kKeys / 16 - 1; step >= 0; --step) {
      Wgmma<kColumns>::template RegisterMma<true>(dq, ds_packed[step], Further(b, step * 16 * 128),
                                                  true);
    }
    CommitMma();
  }
  WaitMma<0>();
  if (k_before >= 0) ring.Release(k_before);
  ring.PassOver(&cursor, 2 * (first_tile - work.first_tile));

  // The gradient overwrites q in shared memory, which has been read.
  PutFragment<64>(dq, p.gradient_scale, shared + q_offset, 0);
  SyncThreads(1 + consumer, 128);
  const int64_t ld = int64_t{p.kv_heads} * p.heads_per_kv * p.head_dim;
  StoreRows<Shape::kColumnBlocks, 64>(
      shared + q_offset, 0, length - first_query, p.head_dim,
      p.dq + (int64_t{work.queries.first_row} + first_query) * ld + work.head * p.head_dim, ld);
}

template <int kHeadDim>
__global__ void __launch_bounds__(QueryGradientShape<kHeadDim>::kThreads, 1)
    QueryGradientKernel(const __grid_constant__ GradientParams p) {
  using Shape = QueryGradientShape<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = SharedAddress(shared);
  const typename Shape::Ring ring = {base + Shape::kTiles, base + Shape::kBarriers};
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
  work.first_tile = FirstKey(p, first_query) / Shape::kKeys;
  work.end_tile = (min(first_query + Shape::kQueries, work.queries.length) - 1) / Shape::kKeys + 1;
  if (threadIdx.x == 0) ring.Init(1, 4 * Shape::kConsumers, 2 * Shape::kConsumers);
  __syncthreads();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x < 32) CopyKeyTiles<Shape>(p, work, ring, base);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    ConsumeKeys<Shape>(p, work, ring, shared, warpgroup - 1);
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_QUERIES_CUH_
