// Split S: a cluster of S blocks computes one tile. Each block computes some of the leaves and
// finishes 1/S of the tile's columns. A block's number in the cluster is its rank.
//
// A block's accumulators begin with its own columns (SplitLoader). So column run p of rank r
// belongs to rank r ^ p and is sent there; what arrives from rank r ^ p is in slot p - 1. A thread
// exchanges data only with threads of the same number. In a tree, a rank's leaves are neighbours:
// it adds up their subtree, and one exchange adds the rest. In a chain, rank r computes leaf S i +
// r in round i. Every round ends with an exchange, whose sums are added while the next round is
// multiplied.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_SPLIT_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_SPLIT_CUH_

#include "kernels/cuda/sm90/device/cluster.cuh"
#include "kernels/cuda/sm90/linear/tile.cuh"

namespace isobit::cuda::tile {

template <int kRows, int kColumns, int kSplit_, contract::LeafSum kSum_>
struct SplitTraits {
  using Size = TileSize<kRows, kColumns>;
  static constexpr int kSplit = kSplit_;
  static constexpr contract::LeafSum kSum = kSum_;
  static constexpr int kValues = Size::kValues;
  static constexpr int kOwnValues = kValues / kSplit;
  static constexpr int kSlotBytes = kOwnValues * 128 * static_cast<int>(sizeof(float));
  static constexpr int kInboxBytes = (kSplit - 1) * kSlotBytes;  // of one consumer
  // If a rank has four leaves of a tree, the sum of the first two stays in registers, except for so
  // many values, which are saved in shared memory.
  static constexpr int kSaved =
      kSum == contract::LeafSum::kTree && kSplit == 2 && kValues > 64 ? kValues / 2 : 0;
  static constexpr int kSavedBytes = kSaved * 128 * static_cast<int>(sizeof(float));
  using RingT = Ring<Size, 2 * (kInboxBytes + kSavedBytes)>;
  static_assert(kOwnValues % 4 == 0);  // a block finishes whole octets
};

// The exchange of one consumer (a warpgroup) with the same consumer of the other blocks.
template <class Traits>
struct Exchange {
  uint32_t inbox;    // this thread's first word of slot 0
  uint32_t arrived;  // barrier: a round's slots are full
  uint32_t drained;  // barrier: the other blocks have read what was sent to them
  uint32_t rank;

  __device__ __forceinline__ Exchange(const typename Traits::RingT& ring, int consumer,
                                      uint32_t the_rank)
      : inbox(ring.extra() + consumer * Traits::kInboxBytes + threadIdx.x % 128 * 16),
        arrived(ring.own(consumer)),
        drained(ring.own(2 + consumer)),
        rank(the_rank) {}

  __device__ __forceinline__ void Send(const float (&sums)[Traits::kValues]) const {
    if (threadIdx.x % 128 == 0) ExpectBytes(arrived, Traits::kInboxBytes);
#pragma unroll
    for (int p = 1; p < Traits::kSplit; ++p) {
      const uint32_t to = AddressInBlock(inbox + (p - 1) * Traits::kSlotBytes, rank ^ p);
      const uint32_t barrier = AddressInBlock(arrived, rank ^ p);
#pragma unroll
      for (int i = 0; i < Traits::kOwnValues; i += 4) {
        const int at = p * Traits::kOwnValues + i;
        StoreToBlock(to + i * 512, sums[at], sums[at + 1], sums[at + 2], sums[at + 3], barrier);
      }
    }
  }
  __device__ __forceinline__ void WaitArrived(uint32_t round) const {
    WaitClusterBarrier(arrived, round & 1);
  }
  __device__ __forceinline__ void WaitDrained(uint32_t round) const {
    WaitClusterBarrier(drained, round & 1);
  }
  // The values read have been added, so the reads are complete; nothing else needs ordering.
  __device__ __forceinline__ void TellDrained() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int p = 1; p < Traits::kSplit; ++p) ArriveAtBlock(AddressInBlock(drained, rank ^ p));
    }
  }
  // Reads four sums from slot p - 1.
  __device__ __forceinline__ void Read(int p, int i, float (&values)[4]) const {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(inbox + (p - 1) * Traits::kSlotBytes + i * 512)
                 : "memory");
  }
};

// sums[0 .. own) = the tree over the subtrees of all ranks. The order within a pair does not
// matter.
template <class Traits>
__device__ __forceinline__ void AddTree(const Exchange<Traits>& exchange,
                                        float (&sums)[Traits::kValues]) {
#pragma unroll
  for (int i = 0; i < Traits::kOwnValues; i += 4) {
    float s[Traits::kSplit][4];
#pragma unroll
    for (int p = 1; p < Traits::kSplit; ++p) exchange.Read(p, i, s[p]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float ordered[Traits::kSplit];
      ordered[0] = sums[i + e];
#pragma unroll
      for (int p = 1; p < Traits::kSplit; ++p) ordered[p] = s[p][e];
      sums[i + e] = contract::TreeOf(ordered, Traits::kSplit);
    }
  }
}

// total += a round's sums, in the order of their leaves; `own` is this rank's.
template <class Traits>
__device__ __forceinline__ void AddRound(const Exchange<Traits>& exchange,
                                         const float (&own)[Traits::kOwnValues],
                                         float (&total)[Traits::kOwnValues]) {
#pragma unroll
  for (int source = 0; source < Traits::kSplit; ++source) {
    const int p = source ^ static_cast<int>(exchange.rank);
    if (p == 0) {
      AddSums(total, own);
    } else {
#pragma unroll
      for (int i = 0; i < Traits::kOwnValues; i += 4) {
        float values[4];
        exchange.Read(p, i, values);
#pragma unroll
        for (int e = 0; e < 4; ++e) total[i + e] = contract::Add(total[i + e], values[e]);
      }
    }
  }
}

// The producer's copies for the tile. Position p of the tile's weights in shared memory has column
// run p ^ rank, so that a rank's own run comes first. If each consumer has its own columns, this
// holds within the columns of each consumer.
template <class Traits>
struct SplitLoader {
  using RingT = typename Traits::RingT;
  static constexpr int kRun = Traits::Size::kConsumerColumns / Traits::kSplit;

  const Work& work;
  const RingT& ring;
  int row_tile;
  int column_tile;
  int rank;

  // Announces the stage's bytes and starts copying the weights.
  __device__ __forceinline__ void LoadWeights(int stage, int block) const {
    const int first_row = column_tile * Traits::Size::kColumns;
    const int rows = min(work.weight_tiles * kTileRows - first_row, Traits::Size::kColumns);
    ExpectBytes(ring.full(stage), XBytes<typename Traits::Size>(work, row_tile) + rows * kRowBytes);
#pragma unroll 1
    for (int i = 0; i < Traits::Size::kColumns / kRun; ++i) {
      const int run = (i ^ rank) * kRun;
      CopyWeightRows(work, first_row + run, min(rows - run, kRun), block,
                     ring.weight(stage) + i * kRun * kRowBytes, ring.full(stage));
    }
  }
  __device__ __forceinline__ void LoadX(int stage, int column) const {
    CopyX<typename Traits::Size>(work, row_tile, column, ring.x(stage), ring.full(stage));
  }
};

template <class Traits>
__device__ __forceinline__ void ConsumeSplit(const Work& work, const typename Traits::RingT& ring,
                                             uint32_t rank) {
  using Size = typename Traits::Size;
  constexpr int kOwn = Traits::kOwnValues;
  const int consumer = threadIdx.x / 128 - 1;
  const int thread = threadIdx.x % 128;
  LeafMultiplier<Size, false, typename Traits::RingT> multiplier(work.leaves, ring, consumer, 0);
  const Exchange<Traits> exchange(ring, consumer, rank);
  const int tile = static_cast<int>(blockIdx.x) / Traits::kSplit;
  const int row = tile % work.row_tiles * Size::kRows + consumer * Size::kConsumerRowOffset +
                  thread / 32 * 16 + thread % 32 / 4;
  const int octet = tile / work.row_tiles * (Size::kColumns / 8) +
                    consumer * (Size::kConsumerColumnOffset / 8) +
                    static_cast<int>(rank) * (kOwn / 4);
  const int mine = work.leaves.num_leaves / Traits::kSplit;
  const uint32_t operation = OperationOf(work.out.target);
  float x[Traits::kValues];
  if constexpr (Traits::kSum == contract::LeafSum::kTree) {
    const int first = mine * static_cast<int>(rank);
    multiplier.Leaf(x, first);
    if (mine >= 2) {
      float y[Traits::kValues];
      multiplier.Leaf(y, first + 1);
      AddSums(x, y);
      if constexpr (Traits::kSplit == 2) {
        if (mine == 4) {
          constexpr int kKept = Traits::kValues - Traits::kSaved;
          const uint32_t saved =
              ring.extra() + 2 * Traits::kInboxBytes + consumer * Traits::kSavedBytes + thread * 16;
          float left[kKept];
          CopySums(left, x);
          SaveSums<kKept, Traits::kValues>(saved, x);
          multiplier.Leaf(x, first + 2);
          multiplier.Leaf(y, first + 3);
          AddSums(x, y);
          AddSums(x, left);
          AddSaved<kKept, Traits::kValues>(x, saved);
        }
      }
    }
    exchange.Send(x);
    exchange.WaitArrived(0);
    AddTree(exchange, x);
    StoreSums<kOwn / 4>(work.out, x, row, octet, operation);
  } else {
    float own[kOwn];
    float total[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) total[i] = 0.0f;  // no leaf's sum is -0
    multiplier.Leaf(x, static_cast<int>(rank));
    exchange.Send(x);
    CopySums(own, x);
#pragma unroll 1
    for (int round = 1; round < mine; ++round) {
      multiplier.Leaf(x, Traits::kSplit * round + static_cast<int>(rank), [&] {
        exchange.WaitArrived(round - 1);
        AddRound(exchange, own, total);
        exchange.TellDrained();
      });
      exchange.WaitDrained(round - 1);
      exchange.Send(x);
      CopySums(own, x);
    }
    exchange.WaitArrived(mine - 1);
    AddRound(exchange, own, total);
    StoreSums<kOwn / 4>(work.out, total, row, octet, operation);
  }
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, Traits::Size::kBlocks)
    MultiplySplitTile(const __grid_constant__ Work work) {
  extern __shared__ std::byte shared[];
  using RingT = typename Traits::RingT;
  const RingT ring(shared);
  const uint32_t rank = blockIdx.x % Traits::kSplit;
  const int tile = static_cast<int>(blockIdx.x) / Traits::kSplit;
  const SplitLoader<Traits> loader = {work, ring, tile % work.row_tiles, tile / work.row_tiles,
                                      static_cast<int>(rank)};
  const int mine = work.leaves.num_leaves / Traits::kSplit;
  const int leaf_blocks = work.leaves.block[1];
  const int blocks = mine * leaf_blocks;
  // The i-th block of K of this rank. All leaves have the same length.
  const auto block_of = [&](int i) {
    if constexpr (Traits::kSum == contract::LeafSum::kTree) {
      return static_cast<int>(rank) * blocks + i;
    } else {
      const int round = i / leaf_blocks;
      return (round * Traits::kSplit + static_cast<int>(rank)) * leaf_blocks + i % leaf_blocks;
    }
  };
  const int early = min(RingT::kStages, blocks);
  if (threadIdx.x == 0) {
    ring.InitBarriers();
    for (int consumer = 0; consumer < 2; ++consumer) {
      InitBarrier(ring.own(consumer), 1);
      InitBarrier(ring.own(2 + consumer), 4 * (Traits::kSplit - 1));
    }
    FenceBarrierInit();
  }
  __syncthreads();
  ArriveCluster();
  ReleaseAtStart(work.out.target);
  if (threadIdx.x < 128) {
    BecomeProducer();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < RingT::kProducers && ElectLane()) {
      for (int i = warp; i < early; i += RingT::kProducers) loader.LoadWeights(i, block_of(i));
      WaitForPredecessor();
      ReleaseAfterWait(work.out.target);
      Cursor<RingT::kStages> cursor;
      cursor.parity = 1;
      for (int i = 0; i < blocks; ++i, cursor.Advance()) {
        if (i % RingT::kProducers != warp) continue;
        const int block = block_of(i);
        if (i >= early) {
          WaitBarrier(ring.empty(cursor.stage), cursor.parity);
          loader.LoadWeights(cursor.stage, block);
        }
        loader.LoadX(cursor.stage, block * kBlockColumns);
      }
    }
    __syncwarp();
    WaitCluster();
  } else {
    BecomeConsumer<typename Traits::Size>();
    WaitForPredecessor();
    WaitCluster();
    ConsumeSplit<Traits>(work, ring, rank);
  }
}

template <class Traits>
absl::Status LaunchSplit(const Work& work, const Stream& stream) {
  const int blocks = work.row_tiles * work.column_tiles * Traits::kSplit;
  const Grid grid = {dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                     static_cast<size_t>(Traits::RingT::kSharedBytes), Traits::kSplit};
  return Launch(MultiplySplitTile<Traits>, grid, stream, work);
}

}  // namespace isobit::cuda::tile

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_SPLIT_CUH_
