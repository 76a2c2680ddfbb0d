// Split 1: one block per multiprocessor (two for 64-row tiles); blocks take the tiles in turn. A
// block computes a tile's leaves one after the other and keeps pending sums in registers.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_PERSISTENT_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_PERSISTENT_CUH_

#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/card.h"
#include "kernels/cuda/sm90/linear/tile.cuh"

namespace isobit::cuda::tile {

enum class Sums {
  kChain,  // any number of leaves, and a tree of one or two
  kTree4,
  kTree8,
};

template <int kRows, int kColumns, Sums kSums_, bool kRagged_>
struct PersistentTraits {
  using Size = TileSize<kRows, kColumns>;
  static constexpr Sums kSums = kSums_;
  static constexpr bool kRagged = kRagged_;
  // The tree of 8 keeps its left half's sum here while the right half is computed.
  static constexpr int kLeftBytes =
      kSums == Sums::kTree8 ? kRows * kColumns * static_cast<int>(sizeof(float)) : 0;
  // ZeroOperand's 1024 bytes, and more: compute-sanitizer assumes that a k16 operand of kColumns
  // rows has this length, whatever its strides are.
  static constexpr int kZeroBytes = kRagged ? kColumns * 16 * static_cast<int>(sizeof(Bf16)) : 0;
  static_assert(kZeroBytes % 1024 == 0);
  using RingT = Ring<Size, kLeftBytes + kZeroBytes>;
};

// Row tiles in a band. The tiles of a band are computed together, so that their weights are fetched
// from memory once and then stay in L2.
inline constexpr int kBandRows = 8;

// The tile to compute at turn `tile`.
__device__ __forceinline__ TilePosition PositionOf(const Work& work, int tile) {
  const int per_band = kBandRows * work.column_tiles;
  const int band = tile / per_band;
  const int within = tile - band * per_band;
  const int rows = min(work.row_tiles - band * kBandRows, kBandRows);
  return {band * kBandRows + within % rows, within / rows};
}

// The producer's copies for one tile.
template <class Traits>
struct TileLoader {
  using RingT = typename Traits::RingT;

  const Work& work;
  const RingT& ring;
  TilePosition tile;

  __device__ __forceinline__ TileLoader(const Work& the_work, const RingT& the_ring, int number)
      : work(the_work), ring(the_ring), tile(PositionOf(the_work, number)) {}

  // Announces the stage's bytes and starts copying the weights.
  __device__ __forceinline__ void LoadWeights(int stage, int block) const {
    const int first_row = tile.column_tile * Traits::Size::kColumns;
    const int rows = min(work.weight_tiles * kTileRows - first_row, Traits::Size::kColumns);
    ExpectBytes(ring.full(stage),
                XBytes<typename Traits::Size>(work, tile.row_tile) + rows * kRowBytes);
    CopyWeightRows(work, first_row, rows, block, ring.weight(stage), ring.full(stage));
  }
  __device__ __forceinline__ void LoadX(int stage, int column) const {
    CopyX<typename Traits::Size>(work, tile.row_tile, column, ring.x(stage), ring.full(stage));
  }
};

// Producer warp `warp` of kProducers makes every kProducers-th fill of the ring, from fill number
// `warp` on. `early`: the number of fills whose weights are already in flight.
template <class Traits>
__device__ __forceinline__ void ProduceTiles(const Work& work, const typename Traits::RingT& ring,
                                             int warp, int early) {
  Cursor<Traits::RingT::kStages> cursor;
  cursor.parity = 1;
  const int tiles = work.row_tiles * work.column_tiles;
  int turn = warp;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TileLoader<Traits> loader(work, ring, tile);
    for (int leaf = 0; leaf < work.leaves.num_leaves; ++leaf) {
      // An empty leaf's block multiplies zeros, so it does not matter what is copied. x is then
      // copied from column 0, since the leaf's own column need not be a multiple of 16 bytes.
      const bool empty = work.leaves.column[leaf] == work.leaves.column[leaf + 1];
      int column = empty ? 0 : work.leaves.column[leaf];
      for (int block = work.leaves.block[leaf]; block < work.leaves.block[leaf + 1]; ++block) {
        if (turn == 0) {
          if (early <= 0) {
            WaitBarrier(ring.empty(cursor.stage), cursor.parity);
            loader.LoadWeights(cursor.stage, block);
          }
          loader.LoadX(cursor.stage, column);
          turn = Traits::RingT::kProducers;
        }
        --turn;
        --early;
        column += kBlockColumns;
        cursor.Advance();
      }
    }
  }
}

// x = the combined sums of a tile's leaves. left: where this thread's sums of the left half of a
// tree of 8 wait in shared memory. `meanwhile` runs while the first block is multiplied.
template <Sums kSums, class LeafMultiplierT, class Meanwhile>
__device__ __forceinline__ void SumLeaves(LeafMultiplierT& multiplier, int num_leaves,
                                          uint32_t left, float (&x)[LeafMultiplierT::Base::kValues],
                                          Meanwhile meanwhile) {
  constexpr int kValues = LeafMultiplierT::Base::kValues;
  float y[kValues];
  multiplier.Leaf(x, 0, meanwhile);
  if constexpr (kSums == Sums::kChain) {
#pragma unroll 1
    for (int leaf = 1; leaf < num_leaves; ++leaf) {
      multiplier.Leaf(y, leaf);
      AddSums(x, y);
    }
  } else {
    // Three sets of accumulators are used for leaves in turn, so that no sum is copied.
    float z[kValues];
    multiplier.Leaf(y, 1);
    multiplier.Leaf(z, 2, [&] { AddSums(x, y); });
    multiplier.Leaf(y, 3);
    AddSums(z, y);
    if constexpr (kSums == Sums::kTree4) {
      AddSums(x, z);
    } else {
      multiplier.Leaf(y, 4, [&] {
        AddSums(x, z);
        SaveSums<0, kValues>(left, x);
      });
      multiplier.Leaf(x, 5);
      multiplier.Leaf(z, 6, [&] { AddSums(x, y); });
      multiplier.Leaf(y, 7);
      AddSums(z, y);
      AddSums(x, z);
      AddSaved<0, kValues>(x, left);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void ConsumeTiles(const Work& work, const typename Traits::RingT& ring) {
  using Size = typename Traits::Size;
  constexpr int kValues = Size::kValues;
  const int consumer = threadIdx.x / 128 - 1;
  const int thread = threadIdx.x % 128;
  const uint32_t zeros = ring.extra() + Traits::kLeftBytes;
  const uint32_t left = ring.extra() + consumer * (Traits::kLeftBytes / 2) + thread * 16;
  LeafMultiplier<Size, Traits::kRagged, typename Traits::RingT> multiplier(work.leaves, ring,
                                                                           consumer, zeros);
  const int tiles = work.row_tiles * work.column_tiles;
  // The second consumer starts each tile one block late, so that one consumer multiplies while the
  // other adds or stores. Not if the first one could get so far ahead that it signals the start of
  // two tiles.
  const bool skewed = work.leaves.num_blocks() >= Traits::RingT::kStages;
  const uint32_t operation = OperationOf(work.out.target);
  uint32_t turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TilePosition at = PositionOf(work, tile);
    if (skewed && consumer == 1) {
      WaitBarrier(ring.own(0), turn);
      turn ^= 1;
    }
    const auto release_second = [&] {
      if (skewed && threadIdx.x == 128) Arrive(ring.own(0));
    };
    const int row = at.row_tile * Size::kRows + consumer * Size::kConsumerRowOffset +
                    thread / 32 * 16 + thread % 32 / 4;
    const int octet =
        at.column_tile * (Size::kColumns / 8) + consumer * (Size::kConsumerColumnOffset / 8);
    float x[kValues];
    SumLeaves<Traits::kSums>(multiplier, work.leaves.num_leaves, left, x, release_second);
    StoreSums<Size::kOctets>(work.out, x, row, octet, operation);
  }
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, Traits::Size::kBlocks)
    MultiplyTiles(const __grid_constant__ Work work) {
  extern __shared__ std::byte shared[];
  const typename Traits::RingT ring(shared);
  if (threadIdx.x == 0) {
    ring.InitBarriers();
    InitBarrier(ring.own(0), 1);
    FenceBarrierInit();
  }
  if constexpr (Traits::kRagged) {
    for (uint32_t i = threadIdx.x * 4; i < Traits::kZeroBytes; i += kThreads * 4) {
      const uint32_t at = ring.extra() + Traits::kLeftBytes + i;
      asm volatile("st.shared.b32 [%0], 0;" ::"r"(at) : "memory");
    }
    FenceSharedForAsync();
  }
  __syncthreads();
  ReleaseAtStart(work.out.target);
  if (threadIdx.x < 128) {
    BecomeProducer();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < Traits::RingT::kProducers && ElectLane()) {
      const int early = min(Traits::RingT::kStages, work.leaves.num_blocks());
      const TileLoader<Traits> loader(work, ring, static_cast<int>(blockIdx.x));
      for (int i = warp; i < early; i += Traits::RingT::kProducers) loader.LoadWeights(i, i);
      WaitForPredecessor();
      ReleaseAfterWait(work.out.target);
      ProduceTiles<Traits>(work, ring, warp, early);
    }
  } else {
    BecomeConsumer<typename Traits::Size>();
    WaitForPredecessor();
    ConsumeTiles<Traits>(work, ring);
  }
}

// If a thread block has to multiply at least so many blocks of K, the kernel is not launched early.
// In a kernel that starts after its predecessor, blocks with neighbouring numbers run on
// neighbouring multiprocessors, where they share what they read of x and the weight. Early blocks
// run wherever the previous kernel leaves room. In a long product that costs more time and energy
// than the microseconds that an early start saves.
inline constexpr int64_t kLongRun = 400;

// Launches the kernel on at most as many blocks as the card holds.
template <class Traits>
absl::Status LaunchPersistent(const Work& work, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const Card* const card, CardOf(stream));
  const int tiles = work.row_tiles * work.column_tiles;
  const auto at_once = static_cast<int>(card->multiprocessors * Traits::Size::kBlocks);
  const int blocks = std::min(tiles, at_once);
  const Grid grid = {dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                     static_cast<size_t>(Traits::RingT::kSharedBytes)};
  const bool is_long = int64_t{tiles} * work.leaves.num_blocks() >= kLongRun * blocks;
  return Launch(MultiplyTiles<Traits>, grid, stream.WithDependent(stream.dependent && !is_long),
                work);
}

}  // namespace isobit::cuda::tile

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_PERSISTENT_CUH_
