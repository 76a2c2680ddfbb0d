// The kernel of dK and dV. A block takes a tile of keys of one KV head and passes over the queries
// of the KV head's query heads: heads ascending, rows ascending. Scores are transposed in
// registers, keys by queries, so that weights and score gradients are A operands of the products
// with dO and Q, which stay in shared memory as the copy engine writes them.
//
// Up to 128 columns, each of two consumer warpgroups has 64 keys. With 256 columns, both gradients
// of 64 keys do not fit into one warpgroup's registers: both consumers have the same keys, and the
// first computes dV, the second dK.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_KEYS_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_KEYS_CUH_

#include <cstdint>

#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/sm90/attention/gradient.cuh"
#include "kernels/cuda/sm90/attention/gradient.h"
#include "kernels/cuda/sm90/attention/matrix_fragments.cuh"
#include "kernels/cuda/sm90/device/shared_memory.h"

namespace isobit::cuda {

// Writes a tile of ds from a consumer warpgroup's registers to memory, through `tile` in shared
// memory, after waiting until the previous tile has left shared memory. to(): the destination.
template <typename To>
__device__ __forceinline__ void WriteScores(const uint32_t (&ds)[4][4], uint32_t tile, int barrier,
                                            To to) {
  const int thread = static_cast<int>(threadIdx.x % 128);
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    StoreMatrices(ds[k], tile + row * 128 + ((2 * k + lane / 16) ^ (row % 8)) * 16);
  }
  FenceSharedForAsync();
  if (thread == 0) WaitForStoreReads();
  SyncThreads(barrier, 128);
  if (thread == 0) {
    StoreBytes(to(), tile, kScoreTileBytes, kEvictFirst);
    CommitStores();
  }
}

template <int kHeadDim>
struct KeyGradientShape {
  static constexpr int kColumns = kHeadDim;
  static constexpr int kColumnBlocks = (kHeadDim + 63) / 64;
  static constexpr bool kSplitRoles = kHeadDim > 128;
  static constexpr int kKeys = KeyTileRows(kHeadDim);  // of a block
  static constexpr int kQueries = 64;                  // of a tile
  static constexpr int kThreads = 3 * 128;
  static constexpr int kSlots = kHeadDim > 128 ? 4 : kHeadDim > 64 ? 8 : 16;

  static constexpr int kKeptBytes = kColumnBlocks * kKeys * 128;
  static constexpr int kSlotBytes = kColumnBlocks * kQueries * 128;
  static constexpr int kRowValueBytes = kQueries * 4;  // L or D of a tile
  // Offsets in shared memory.
  static constexpr int kK = 0;
  static constexpr int kV = kKeptBytes;
  static constexpr int kTiles = 2 * kKeptBytes;
  static constexpr int kRowValues = kTiles + kSlots * kSlotBytes;
  static constexpr int kScores = kRowValues + kSlots * kRowValueBytes;  // ds on its way to memory
  static_assert(kScores % 128 == 0);
  static constexpr int kWriters = kSplitRoles ? 1 : 2;
  static constexpr int kBarriers = kScores + kWriters * 2 * kScoreTileBytes;
  using Ring = TileRing<kSlots, kSlotBytes>;
  static constexpr int kSharedBytes = kBarriers + Ring::kBarrierBytes;
  static_assert(kSharedBytes <= kBlockSharedBytes);
};

// A block's work. Slots have tiles of q and dO in turn, with L and D.
struct KeyWork {
  SequenceTile keys;
  int32_t kv_head;
  int32_t first_tile;  // of the queries that see a key of the block
  int32_t end_tile;
};

// The end of the tiles of 64 queries that see a key of [first_key, end_key).
__device__ __forceinline__ int EndOfQueries(const GradientParams& p, int length, int end_key) {
  int end = length;
  if (p.window != 0) end = min(end, min(end_key, length) - 1 + p.window);
  return (end + 63) / 64;
}

// Copies L (with q) and D (with dO) of the queries, by one warp. 16 queries at a time are in the
// order in which a thread of a fragment needs them: 2q, 2q + 1, 2q + 8, 2q + 9 for lane q of four.
template <class Shape>
__device__ __forceinline__ void CopyRowValues(const GradientParams& p, const KeyWork& work,
                                              const typename Shape::Ring& ring, uint32_t base) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  typename Shape::Ring::Cursor cursor;
  for (int h = 0; h < p.heads_per_kv; ++h) {
    const int64_t head_row =
        int64_t{work.kv_head * p.heads_per_kv + h} * p.rows + work.keys.first_row;
    for (int tile = work.first_tile; tile < work.end_tile; ++tile) {
#pragma unroll
      for (int of_dout = 0; of_dout < 2; ++of_dout, cursor.Advance()) {
        const float* const from = (of_dout ? p.output_dots : p.log_sums) + head_row;
        const uint32_t to = base + Shape::kRowValues + cursor.slot * Shape::kRowValueBytes;
        ring.WaitEmpty(cursor);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = half * 32 + lane;
          const int query = tile * 64 + r;
          const int at = r / 16 * 16 + r % 8 / 2 * 4 + r % 16 / 8 * 2 + r % 2;
          const bool real = query < work.keys.length;
          asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + at * 4),
                       "l"(from + (real ? query : 0)), "r"(real ? 4 : 0)
                       : "memory");
        }
        asm volatile(
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ring.Full(cursor.slot))
            : "memory");
      }
    }
  }
}

// Copies the tiles of keys, values, queries and output gradients. Run by one warp.
template <class Shape>
__device__ __forceinline__ void CopyQueryTiles(const GradientParams& p, const KeyWork& work,
                                               const typename Shape::Ring& ring, uint32_t base) {
  constexpr int kBlocks = Shape::kColumnBlocks;
  const int first_key = work.keys.first_row + work.keys.tile * Shape::kKeys;
  if (threadIdx.x % 32 == 0) {
    CopyTile<kBlocks, Shape::kKeys>(base + Shape::kK, p.k_map, first_key, work.kv_head,
                                    ring.Kept());
    CopyTile<kBlocks, Shape::kKeys>(base + Shape::kV, p.v_map, first_key, work.kv_head,
                                    ring.Kept());
  }
  __syncwarp();
  typename Shape::Ring::Cursor cursor;
  for (int h = 0; h < p.heads_per_kv; ++h) {
    const int head = work.kv_head * p.heads_per_kv + h;
    for (int tile = work.first_tile; tile < work.end_tile; ++tile) {
      const int row = work.keys.first_row + tile * 64;
      const int valid = work.keys.length - tile * 64;
      FillSlot<kBlocks, 64>(ring, &cursor, p.q_map, row, head, valid, 0);
      FillSlot<kBlocks, 64>(ring, &cursor, p.dout_map, row, head, valid, 1);
    }
  }
}

// One consumer warpgroup: the chains of 64 keys, for dV, dK or both.
template <class Shape, bool kMakesDv, bool kMakesDk>
class KeyGradientConsumer {
 public:
  __device__ __forceinline__ KeyGradientConsumer(const GradientParams& p, const KeyWork& work,
                                                 const typename Shape::Ring& ring, uint8_t* shared,
                                                 int consumer)
      : p_(p),
        work_(work),
        ring_(ring),
        shared_(shared),
        base_(SharedAddress(shared)),
        consumer_(consumer),
        thread_(static_cast<int>(threadIdx.x % 128)),
        lane_(thread_ % 32),
        first_(Shape::kSplitRoles ? 0 : consumer * 64),
        first_key_(work.keys.tile * Shape::kKeys + first_),
        length_(work.keys.length),
        score_tiles_(Shape::kSplitRoles ? 0 : consumer * 2) {
    const bool any = first_key_ < length_;
    first_tile_ = Uniform(any ? first_key_ / 64 : work.end_tile);
    end_tile_ = Uniform(any ? EndOfQueries(p, length_, first_key_ + 64) : int{work.end_tile});
    full_end_ = Uniform(p.window == 0 ? length_ : min(length_, first_key_ + p.window));
    key_ = first_key_ + thread_ / 32 * 16 + lane_ / 4;
    bounded_ = *p.unbounded == 0;
  }

  __device__ __forceinline__ void Run() {
    WaitBarrier(ring_.Kept(), 0);
    for (int h = 0; h < p_.heads_per_kv; ++h) {
      ring_.PassOver(&cursor_, 2 * (first_tile_ - work_.first_tile));
      q_before_ = -1;
      dout_before_ = -1;
      for (int tile = first_tile_; tile < end_tile_; ++tile) RunTile(h, tile);
      WaitMma<0>();
      ReleaseBefore();
      ring_.PassOver(&cursor_, 2 * (work_.end_tile - end_tile_));
    }
    if (kMakesDk && thread_ == 0) WaitForStores();
    Store();
  }

 private:
  static constexpr int kColumns = Shape::kColumns;
  static constexpr int kBlockBytes = Shape::kKeys * 128;  // of 64 columns of the block's keys

  // The slots of the previous tile.
  __device__ __forceinline__ void ReleaseBefore() {
    if (q_before_ < 0) return;
    ring_.Release(q_before_);
    ring_.Release(dout_before_);
  }

  __device__ __forceinline__ void RunTile(int h, int tile) {
    const bool edge = tile == first_tile_ || tile * 64 + 64 > full_end_;
    const typename Shape::Ring::Cursor q = cursor_;
    cursor_.Advance();
    const typename Shape::Ring::Cursor dout = cursor_;
    cursor_.Advance();
    ring_.WaitFull(q);
    FenceMma();
    MultiplyColumns<64, kColumns>(s_, KMajorOperand(base_ + Shape::kK + first_ * 128), kBlockBytes,
                                  KMajorOperand(ring_.Tile(q.slot)), kBoxBytes);
    // The products of the previous tile are done: their operands' registers are free for e.
    WaitMma<1>();
    ReleaseBefore();
    q_before_ = q.slot;
    dout_before_ = dout.slot;
    ring_.WaitFull(dout);
    if constexpr (kMakesDk) {
      FenceMma();
      MultiplyColumns<64, kColumns>(e_, KMajorOperand(base_ + Shape::kV + first_ * 128),
                                    kBlockBytes, KMajorOperand(ring_.Tile(dout.slot)), kBoxBytes);
    }
    WaitMma<kMakesDk ? 1 : 0>();

    float row[16];  // L, then D, of this thread's queries
    ReadRowValues(q.slot, row);
    Weigh(s_, p_.scale, bounded_, [&](int i) { return row[OfQuery(i)]; });
    if (__builtin_expect(edge, 0)) ClearUnseen(tile, s_);
    if constexpr (kMakesDk) {
      WaitMma<0>();
      ReadRowValues(dout.slot, row);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        e_[i] = contract::Mul(s_[i], contract::Sub(e_[i], row[OfQuery(i)]));
      }
      if (__builtin_expect(edge, 0)) ClearUnseen(tile, e_);
      PackFragment(e_, ds_packed_);
      if (p_.score_gradients != nullptr) {
        const uint32_t to = base_ + Shape::kScores + (score_tiles_ + turn_) * kScoreTileBytes;
        turn_ ^= 1;
        WriteScores(ds_packed_, to, 1 + consumer_, [&] {
          const int head = (work_.kv_head - p_.first_kv_head) * p_.heads_per_kv + h;
          return ScoreTile(p_, work_.keys, head, tile, first_key_ / 64);
        });
      }
    }
    if constexpr (kMakesDv) PackFragment(s_, p_packed_);
    // All operands in registers are complete before the first of these products: otherwise the
    // compiler would not let them overlap with those of the next tile.
    FenceMma();
    if constexpr (kMakesDv) MultiplyRows(dv_, p_packed_, ring_.Tile(dout.slot));
    if constexpr (kMakesDk) MultiplyRows(dk_, ds_packed_, ring_.Tile(q.slot));
    CommitMma();
  }

  // The place of element i's query in what ReadRowValues reads.
  static constexpr __device__ __forceinline__ int OfQuery(int i) {
    return i / 8 * 4 + i / 4 % 2 * 2 + i % 2;
  }
  __device__ __forceinline__ void ReadRowValues(int slot, float (&row)[16]) const {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      *reinterpret_cast<float4*>(row + 4 * g) = *reinterpret_cast<const float4*>(
          shared_ + Shape::kRowValues + slot * Shape::kRowValueBytes + g * 64 + lane_ % 4 * 16);
    }
  }

  // x[i] = +0 where the query of element i, in `tile`, does not see the element's key.
  __device__ __forceinline__ void ClearUnseen(int tile, float (&x)[32]) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] = Sees(tile, i) ? x[i] : 0.0f;
  }
  __device__ __forceinline__ bool Sees(int tile, int i) const {
    const int h = i / 2 % 2;
    const int query = i / 4 * 8 + i % 2;
    const int before = tile * 64 + lane_ % 4 * 2;
    int end = length_;
    if (p_.window != 0) end = min(end, key_ + 8 * h + p_.window);
    return (query >= key_ + 8 * h - before) & (query < end - before);
  }

  __device__ __forceinline__ void MultiplyRows(float (&d)[kColumns / 2], const uint32_t (&a)[4][4],
                                               uint32_t tile) const {
    const uint64_t b = TransposedOperand(tile, kBoxBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Wgmma<kColumns>::template RegisterMma<true>(d, a[k], Further(b, k * 16 * 128), true);
    }
  }

  // The gradients pass through the shared memory of the keys and values, which have been read.
  __device__ __forceinline__ void Store() {
    if constexpr (Shape::kSplitRoles) SyncThreads(3, 256);
    if constexpr (kMakesDv) PutFragment<Shape::kKeys>(dv_, 1.0f, shared_ + Shape::kV, first_);
    if constexpr (kMakesDk) {
      PutFragment<Shape::kKeys>(dk_, p_.gradient_scale, shared_ + Shape::kK, first_);
    }
    SyncThreads(1 + consumer_, 128);
    const int64_t ld = int64_t{p_.kv_heads} * p_.head_dim;
    const int64_t at =
        (int64_t{work_.keys.first_row} + first_key_) * ld + work_.kv_head * p_.head_dim;
    const int count = length_ - first_key_;
    if constexpr (kMakesDv) {
      StoreRows<Shape::kColumnBlocks, Shape::kKeys>(shared_ + Shape::kV, first_, count, p_.head_dim,
                                                    p_.dv + at, ld);
    }
    if constexpr (kMakesDk) {
      StoreRows<Shape::kColumnBlocks, Shape::kKeys>(shared_ + Shape::kK, first_, count, p_.head_dim,
                                                    p_.dk + at, ld);
    }
  }

  const GradientParams& p_;
  const KeyWork work_;
  const typename Shape::Ring ring_;
  uint8_t* const shared_;
  const uint32_t base_;
  const int consumer_;
  const int thread_;  // of the warpgroup
  const int lane_;
  const int first_;  // of this consumer's keys in the tile
  const int first_key_;
  const int length_;
  const int score_tiles_;  // ds goes to memory through two tiles from this one on, used in turn
  int turn_ = 0;
  // The tiles with a query that sees one of these keys. The block's other tiles are skipped.
  int first_tile_;
  int end_tile_;
  int full_end_;  // in tiles after the first that end before it, every query sees every key
  int key_;
  bool bounded_;
  typename Shape::Ring::Cursor cursor_;
  int q_before_ = -1;
  int dout_before_ = -1;
  float dv_[kMakesDv ? kColumns / 2 : 1] = {};
  float dk_[kMakesDk ? kColumns / 2 : 1] = {};
  float s_[32];
  float e_[kMakesDk ? 32 : 1];
  uint32_t p_packed_[4][4];
  uint32_t ds_packed_[4][4];
};

template <int kHeadDim>
__global__ void __launch_bounds__(KeyGradientShape<kHeadDim>::kThreads, 1)
    KeyGradientKernel(const __grid_constant__ GradientParams p) {
  using Shape = KeyGradientShape<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = SharedAddress(shared);
  const typename Shape::Ring ring = {base + Shape::kTiles, base + Shape::kBarriers};
  const int warpgroup = Uniform(static_cast<int>(threadIdx.x) / 128);

  WaitForPredecessor();
  ReleaseSuccessor();
  KeyWork work;
  const int index = static_cast<int>(blockIdx.x);
  work.kv_head = p.first_kv_head + index % p.launch_kv_heads;
  if (!FindTile(p, Shape::kKeys, index / p.launch_kv_heads, &work.keys)) return;
  const int first_key = work.keys.tile * Shape::kKeys;
  work.first_tile = first_key / 64;
  work.end_tile = EndOfQueries(p, work.keys.length, first_key + Shape::kKeys);
  if (threadIdx.x == 0) ring.Init(1 + 32, 8, 2);
  __syncthreads();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x < 32) {
      CopyQueryTiles<Shape>(p, work, ring, base);
    } else if (threadIdx.x < 64) {
      CopyRowValues<Shape>(p, work, ring, base);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    if constexpr (!Shape::kSplitRoles) {
      KeyGradientConsumer<Shape, true, true>(p, work, ring, shared, warpgroup - 1).Run();
    } else if (warpgroup == 1) {
      KeyGradientConsumer<Shape, true, false>(p, work, ring, shared, 0).Run();
    } else {
      KeyGradientConsumer<Shape, false, true>(p, work, ring, shared, 1).Run();
    }
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_KEYS_CUH_
