// Shared by the tiles of training's matrix products. Both operands are row-major matrices, copied
// by tensor map; either may be transposed. Tiles have 128 rows.
//
// K is a list of segments: leaves, the matrices of a stacked weight, or packs. Every segment begins
// with a new block of 64 columns. Thread blocks are persistent and take units of work, a tile each,
// in turn. With kCluster = 2, two thread blocks with neighbouring row tiles share the second
// operand: each fetches half of it for both.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_PRODUCT_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_PRODUCT_CUH_

#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/card.h"
#include "kernels/cuda/sm90/linear/tile.cuh"

namespace isobit::cuda::tile {

// Work is the kernel's parameter, passed by value. It has
//   XMajor, WeightMajor    the operands' orientation (tile.cuh)
//   kExtraBytes<kColumns>  of shared memory, after the zeros of kRagged
//   units                  number of units of work, of kCluster row tiles each
//   At<Traits>(i, rank)    unit i for thread block `rank` of the cluster
//   BlocksOf(s)            number of blocks of 64 columns in segment s
//   BoxesOf(unit, s)       where the operands of the unit's segment s begin
//   Consume<Traits>(ring)  a consumer's work
template <class Work_, int kColumns, bool kRagged_, int kCluster_>
struct ProductTraits {
  using Work = Work_;
  using Size = TileSize<128, kColumns>;
  static constexpr bool kRagged = kRagged_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kZeroBytes =
      kRagged ? kColumns * contract::kMmaK * static_cast<int>(sizeof(Bf16)) : 0;
  static_assert(kZeroBytes == 0 || kZeroBytes >= 2048);
  using RingT = Ring<Size, kZeroBytes + Work::template kExtraBytes<kColumns>, kCluster>;

  // Each block of a cluster copies whole boxes, to multiples of the swizzle's 1024 bytes.
  static_assert(kColumns / kCluster % (Work::WeightMajor::kTransposed ? 64 : 8) == 0);
  static_assert(alignof(Work) % 64 == 0, "tensor maps are aligned to 64 bytes");
};

// Where the boxes of a unit's operands begin: rows of the product, and columns of K.
struct Boxes {
  const CUtensorMap* x;
  const CUtensorMap* weight;
  int32_t x_row;
  int32_t x_k;
  int32_t weight_row;
  int32_t weight_k;
};

// Copies 64 columns of K, kRows rows, of an operand. kMulticast: to both blocks of the cluster.
template <class Major, int kRows, bool kMulticast>
__device__ __forceinline__ void CopyOperand(uint32_t to, const CUtensorMap& map, int row, int k,
                                            uint32_t barrier) {
  const auto copy = [&](uint32_t at, int map_row, int map_column) {
    if constexpr (kMulticast) {
      CopyBoxToBlocks(at, map, map_row, map_column, barrier, kEvictNormal, 3);
    } else {
      CopyBox(at, map, map_row, map_column, barrier, kEvictNormal);
    }
  };
  if constexpr (Major::kTransposed) {
#pragma unroll
    for (int i = 0; i < kRows / 64; ++i) copy(to + i * kBlockBytes, k, row + 64 * i);
  } else {
    copy(to, row, k);
  }
}

// Producer warp `warp` of kProducers fills the ring at every kProducers-th turn.
template <class Traits>
__device__ __forceinline__ void ProduceUnits(const typename Traits::Work& work,
                                             const typename Traits::RingT& ring, int warp,
                                             int rank) {
  using RingT = typename Traits::RingT;
  using Work = typename Traits::Work;
  constexpr int kColumns = Traits::Size::kColumns;
  constexpr int kCluster = Traits::kCluster;
  Cursor<RingT::kStages> cursor;
  cursor.parity = 1;
  int turn = warp;
  for (int unit = blockIdx.x / kCluster; unit < work.units; unit += gridDim.x / kCluster) {
    const auto at = work.template At<Traits>(unit, rank);
    for (int s = at.first_segment; s < at.end_segment; ++s) {
      const int blocks = work.BlocksOf(s);
      Boxes boxes = work.BoxesOf(at, s);
#pragma unroll 1
      for (int i = 0; i < blocks; ++i) {
        if (turn == 0) {
          const uint32_t full = ring.full(cursor.stage);
          WaitBarrier(ring.empty(cursor.stage), cursor.parity);
          ExpectBytes(full, RingT::kXBytes + RingT::kWeightBytes);
          CopyOperand<typename Work::XMajor, 128, false>(ring.x(cursor.stage), *boxes.x,
                                                         boxes.x_row, boxes.x_k, full);
          CopyOperand<typename Work::WeightMajor, kColumns / kCluster, (kCluster > 1)>(
              ring.weight(cursor.stage) + rank * (RingT::kWeightBytes / kCluster), *boxes.weight,
              boxes.weight_row + rank * (kColumns / kCluster), boxes.weight_k, full);
          turn = RingT::kProducers;
        }
        --turn;
        boxes.x_k += kBlockColumns;
        boxes.weight_k += kBlockColumns;
        cursor.Advance();
      }
    }
  }
}

// Makes the second consumer start each unit one block late, so that one consumer multiplies while
// the other stores. Off if the first could get so far ahead that it signals the start of two units:
// a unit must have kStages blocks.
template <class Traits>
struct Skew {
  const typename Traits::RingT& ring;
  bool on;
  int consumer;
  uint32_t turn = 0;

  __device__ __forceinline__ void BeginUnit() {
    if (on && consumer == 1) {
      WaitBarrier(ring.own(0), turn);
      turn ^= 1;
    }
  }
  __device__ __forceinline__ void ReleaseSecond() const {
    if (on && threadIdx.x == 128) Arrive(ring.own(0));
  }
};

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    MultiplyChains(const __grid_constant__ typename Traits::Work work) {
  extern __shared__ std::byte shared[];
  using RingT = typename Traits::RingT;
  const RingT ring(shared);
  if (threadIdx.x == 0) {
    ring.InitBarriers();
    InitBarrier(ring.own(0), 1);
    FenceBarrierInit();
  }
  if constexpr (Traits::kRagged) {
    for (uint32_t i = threadIdx.x * 4; i < Traits::kZeroBytes; i += kThreads * 4) {
      asm volatile("st.shared.b32 [%0], 0;" ::"r"(ring.extra() + i) : "memory");
    }
    FenceSharedForAsync();
  }
  __syncthreads();
  if constexpr (Traits::kCluster > 1) {
    ArriveCluster();
    WaitCluster();
  }
  ReleaseSuccessor();
  if (threadIdx.x < 128) {
    BecomeProducer();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < RingT::kProducers && ElectLane()) {
      WaitForPredecessor();
      ProduceUnits<Traits>(work, ring, warp, static_cast<int>(blockIdx.x) % Traits::kCluster);
    }
    __syncwarp();
  } else {
    BecomeConsumer<typename Traits::Size>();
    WaitForPredecessor();
    work.template Consume<Traits>(ring);
  }
  // No block may end while another one may still copy to it or arrive at its barriers.
  if constexpr (Traits::kCluster > 1) {
    ArriveCluster();
    WaitCluster();
  }
}

// Launches the kernel on at most as many clusters as the card holds.
template <class Traits>
absl::Status LaunchChains(const typename Traits::Work& work, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const Card* const card, CardOf(stream));
  const int64_t clusters = std::min<int64_t>(work.units, card->ClustersAtOnce(Traits::kCluster));
  const Grid grid = {dim3(static_cast<unsigned>(clusters * Traits::kCluster)), dim3(kThreads),
                     static_cast<size_t>(Traits::RingT::kSharedBytes), Traits::kCluster};
  return Launch(MultiplyChains<Traits>, grid, stream, work);
}

// Row tiles in a band. The tiles of a band are computed together, so that their operands are
// fetched from memory once and then stay in L2.
inline constexpr int kBandTiles = 16;

// The order in which tiles, or pairs of row tiles, are computed.
struct TileOrder {
  int32_t rows = 0;  // tiles or pairs, as `band`
  int32_t columns = 0;
  int32_t band = kBandTiles;

  __device__ __forceinline__ TilePosition PositionOf(int tile) const {
    const int per_band = band * columns;
    const int number = tile / per_band;
    const int within = tile - number * per_band;
    const int high = min(rows - number * band, band);
    return {number * band + within % high, within / high};
  }
};

}  // namespace isobit::cuda::tile

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_PRODUCT_CUH_
