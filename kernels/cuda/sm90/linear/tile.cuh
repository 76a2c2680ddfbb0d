// Shared by the tile kernels: the ring buffer of operands in shared memory, the copies that fill
// it, and the loop over a leaf that consumes it into accumulators.
//
// A block has three warpgroups. The four warps of the first one, the producers, take turns in
// issuing bulk copies, by one lane each; a single warp would be too slow. The other two warpgroups,
// the consumers, multiply (TileSize). Names are those of a layer with packed weights: x is the
// first operand, copied by tensor map; the weights are the second one.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_CUH_

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/device/barrier.cuh"
#include "kernels/cuda/sm90/device/bulk_copy.cuh"
#include "kernels/cuda/sm90/device/cluster.cuh"
#include "kernels/cuda/sm90/device/wgmma.cuh"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/cuda/sm90/linear/tile_output.cuh"

namespace isobit::cuda::tile {

inline constexpr int kThreads = 384;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kBarrierBytes = 512;
inline constexpr int kRowBytes = kBlockColumns * static_cast<int>(sizeof(Bf16));

// True in one lane of a whole warp, in a form by which the compiler can issue copies without a loop
// over lanes.
__device__ __forceinline__ bool ElectLane() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// The kernels' parameter, which describes a product.
struct Work {
  // x in boxes of a tile's rows, and in boxes of the last tile's rows, rounded up to 8. Whatever is
  // in place of the other rows reaches no row of y.
  CUtensorMap x;
  CUtensorMap last_x;
  int32_t last_x_rows = 0;
  const std::byte* weights = nullptr;
  uint64_t weight_policy = 0;
  LeafBlocks leaves;
  int32_t weight_tiles = 0;  // of kTileRows packed rows
  int32_t row_tiles = 0;
  int32_t column_tiles = 0;
  TileOutput out;
};

// The size in bytes of the box of x for a row tile.
template <class Size>
__device__ __forceinline__ int XBytes(const Work& work, int row_tile) {
  return (row_tile == work.row_tiles - 1 ? work.last_x_rows : Size::kRows) * kRowBytes;
}

// Starts the copy of that box, from column `column` of x on.
template <class Size>
__device__ __forceinline__ void CopyX(const Work& work, int row_tile, int column, uint32_t to,
                                      uint32_t barrier) {
  const CUtensorMap& x = row_tile == work.row_tiles - 1 ? work.last_x : work.x;
  CopyBox(to, x, row_tile * Size::kRows, column, barrier, kEvictNormal);
}

struct TilePosition {
  int row_tile;
  int column_tile;
};

// A tile's rows of x and packed rows of the weight, and a consumer's share of them. In a tile of
// 128 rows a consumer has 64 rows and all columns; in a tile of 64 rows, all rows and half of the
// columns. Blocks of 64-row tiles use half of a multiprocessor, so that blocks of the next kernel
// can fetch their weights at the same time.
template <int kRows_, int kColumns_>
struct TileSize {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static_assert(kRows == 64 || kRows == 128);
  static constexpr int kConsumerColumns = kRows == 128 ? kColumns : kColumns / 2;
  static constexpr int kConsumerRowOffset = kRows == 128 ? 64 : 0;
  static constexpr int kConsumerColumnOffset = kColumns - kConsumerColumns;
  static constexpr int kValues = kConsumerColumns / 2;  // sums of a thread
  static constexpr int kOctets = kConsumerColumns / 8;
  static constexpr int kBlocks = kRows == 128 ? 1 : 2;                 // per multiprocessor
  static constexpr int kSharedLimit = kBlocks == 1 ? 232448 : 115712;  // bytes per block
  static_assert(kConsumerColumns % 8 == 0);
};

// The layout of an operand in a stage, under the 128-byte swizzle. kStep: descriptor units from one
// k16 step to the next. Zeros: an operand of +0; address: 2048 bytes of +0.
//
// KMajor: a row of the operand is a row of 64 columns of K in shared memory.
struct KMajor {
  static constexpr bool kTransposed = false;
  static constexpr int kStep = 2;
  static __device__ __forceinline__ uint64_t At(uint32_t address) { return KMajorOperand(address); }
  static __device__ __forceinline__ uint64_t Zeros(uint32_t address) {
    return ZeroOperand(address);
  }
};
// RowMajor: 64 rows of the operand are one block of shared memory, in which each k is a row.
struct RowMajor {
  static constexpr bool kTransposed = true;
  static constexpr int kStep = contract::kMmaK * kRowBytes / 16;
  static __device__ __forceinline__ uint64_t At(uint32_t address) {
    return TransposedOperand(address, kBlockBytes);
  }
  static __device__ __forceinline__ uint64_t Zeros(uint32_t address) {
    return TransposedOperand(address, 0);
  }
};

// Shared memory: kStages of x and weights, kExtraBytes for the kernel's own use, the barriers.
// Before the kCluster blocks of a cluster fill a stage, they wait for each other's consumers.
template <class Size, int kExtraBytes, int kCluster_ = 1>
struct Ring {
  static constexpr int kCluster = kCluster_;
  static constexpr int kXBytes = Size::kRows * kRowBytes;
  static constexpr int kWeightBytes = Size::kColumns * kRowBytes;
  static constexpr int kAlignment = 1024;
  static constexpr int kStages =
      (Size::kSharedLimit - kAlignment - kBarrierBytes - kExtraBytes) / (kXBytes + kWeightBytes);
  static constexpr int kSharedBytes =
      kAlignment + kStages * (kXBytes + kWeightBytes) + kExtraBytes + kBarrierBytes;
  static_assert(kStages >= 3 && 16 * kStages + 64 <= kBarrierBytes);
  // The warps of the first warpgroup that fill the ring in turn. At most as many as stages:
  // otherwise a warp would wait for a stage two rounds ahead, which the barrier's parity cannot
  // express.
  static constexpr int kProducers = std::min(4, kStages);

  uint32_t base;
  __device__ __forceinline__ explicit Ring(const void* shared)
      : base((SharedAddress(shared) + kAlignment - 1) & ~(kAlignment - 1u)) {}

  __device__ __forceinline__ uint32_t x(int stage) const { return base + stage * kXBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const {
    return base + kStages * kXBytes + stage * kWeightBytes;
  }
  __device__ __forceinline__ uint32_t extra() const {
    return base + kStages * (kXBytes + kWeightBytes);
  }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return extra() + kExtraBytes + 8 * stage;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kStages + stage); }
  // The kernel's own barriers.
  __device__ __forceinline__ uint32_t own(int i) const { return full(2 * kStages + i); }

  __device__ __forceinline__ void InitBarriers() const {
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(full(i), 1);
      InitBarrier(empty(i), kConsumerWarps * kCluster);
    }
  }
};

// A cursor into a ring: a stage, and the parity of the phase to wait for.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The address of packed row `row` (a multiple of 8) of a block of K.
__device__ __forceinline__ const std::byte* WeightRow(const Work& work, int row, int block) {
  const int64_t tile_block =
      static_cast<int64_t>(row / kTileRows) * work.leaves.num_blocks() + block;
  return work.weights + tile_block * kBlockBytes + row % kTileRows * kRowBytes;
}

// Starts copying `rows` packed rows from `first` on (both multiples of 8) of a block of K. No copy
// crosses the end of a row tile.
__device__ __forceinline__ void CopyWeightRows(const Work& work, int first, int rows, int block,
                                               uint32_t to, uint32_t barrier) {
#pragma unroll 1
  for (int row = 0; row < rows;) {
    const int piece = min(kTileRows - (first + row) % kTileRows, rows - row);
    CopyBytes(to + row * kRowBytes, WeightRow(work, first + row, block), piece * kRowBytes, barrier,
              work.weight_policy);
    row += piece;
  }
}

// A consumer's side of the ring. kRagged: some steps of a block may be left out; then zero_address
// is that of 2048 bytes of +0 in shared memory.
template <class Size, class XMajor, class WeightMajor, bool kRagged_, class RingT>
struct Multiplier {
  static constexpr bool kRagged = kRagged_;
  static constexpr int kValues = Size::kValues;  // accumulators of a thread

  const RingT& ring;
  uint64_t x_operand;
  uint64_t weight_operand;
  uint64_t x_zeros;
  uint64_t weight_zeros;
  Cursor<RingT::kStages> cursor;

  __device__ __forceinline__ Multiplier(const RingT& the_ring, int consumer, uint32_t zero_address)
      : ring(the_ring),
        x_operand(XMajor::At(the_ring.x(0) + consumer * Size::kConsumerRowOffset * kRowBytes)),
        weight_operand(WeightMajor::At(the_ring.weight(0) +
                                       consumer * Size::kConsumerColumnOffset * kRowBytes)),
        x_zeros(kRagged ? XMajor::Zeros(zero_address) : 0),
        weight_zeros(kRagged ? WeightMajor::Zeros(zero_address) : 0) {}

  // Starts the four k16 steps of the block at the cursor, which is block i of those that `ends`
  // describes. They run asynchronously. accumulate: if false, the first step starts from +0.
  template <class Ends>
  __device__ __forceinline__ void StartBlock(float (&sums)[kValues], int i, bool accumulate,
                                             const Ends& ends) {
    WaitBarrier(ring.full(cursor.stage), cursor.parity);
    ends.Prepare(i, cursor.stage);
    FenceMma();
    const uint64_t a = x_operand + cursor.stage * (RingT::kXBytes >> 4);
    const uint64_t b = weight_operand + cursor.stage * (RingT::kWeightBytes >> 4);
    const int steps = ends.StepsOf(i);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      // For a step that is left out, zeros are multiplied by zeros, which changes no bit.
      const bool inside = !kRagged || step < steps;
      Mma(sums, inside ? a + step * XMajor::kStep : x_zeros,
          inside ? b + step * WeightMajor::kStep : weight_zeros, accumulate || step != 0);
    }
    CommitMma();
  }
  __device__ __forceinline__ void ReleaseStage(int stage) {
    const int lane = threadIdx.x % 32;
    if constexpr (RingT::kCluster == 1) {
      if (lane == 0) Arrive(ring.empty(stage));
    } else {
      if (lane < RingT::kCluster) ArriveAtBlock(AddressInBlock(ring.empty(stage), lane));
    }
  }

  // Multiplies `blocks` blocks, at least one. Starts from `sums`, after Hold, if `accumulate`;
  // otherwise from +0.
  // ends.StepsOf(i): the steps of block i, if kRagged; ends.Prepare(i, stage) may change the block
  // in shared memory. `meanwhile` runs while the first block is multiplied.
  template <class Ends, class Meanwhile>
  __device__ __forceinline__ void Chain(float (&sums)[kValues], int blocks, bool accumulate,
                                        const Ends& ends, Meanwhile meanwhile) {
    StartBlock(sums, 0, accumulate, ends);
    int previous = cursor.stage;
    cursor.Advance();
    meanwhile();
#pragma unroll 1
    for (int i = 1; i < blocks; ++i) {
      StartBlock(sums, i, true, ends);
      WaitMma<1>();
      ReleaseStage(previous);
      previous = cursor.stage;
      cursor.Advance();
    }
    WaitMma<0>();
    ReleaseStage(previous);
    Hold(sums);
  }

  // Prevents the compiler from reading accumulators before a wait above this call, and from writing
  // them after a fence below it.
  static __device__ __forceinline__ void Hold(float (&sums)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) asm volatile("" : "+f"(sums[i])::"memory");
  }

 private:
  static __device__ __forceinline__ void Mma(float (&sums)[kValues], uint64_t a, uint64_t b,
                                             bool accumulate) {
    using Product = Wgmma<Size::kConsumerColumns>;
    if constexpr (XMajor::kTransposed || WeightMajor::kTransposed) {
      Product::template MajorMma<XMajor::kTransposed, WeightMajor::kTransposed>(sums, a, b,
                                                                                accumulate);
    } else {
      Product::Mma(sums, a, b, accumulate);
    }
  }
};

// Multiplies the leaves of a layer with K-major operands.
template <class Size, bool kRagged, class RingT>
struct LeafMultiplier : Multiplier<Size, KMajor, KMajor, kRagged, RingT> {
  using Base = Multiplier<Size, KMajor, KMajor, kRagged, RingT>;

  const LeafBlocks& leaves;

  __device__ __forceinline__ LeafMultiplier(const LeafBlocks& leaves_of_k, const RingT& ring,
                                            int consumer, uint32_t zero_address)
      : Base(ring, consumer, zero_address), leaves(leaves_of_k) {}

  // sums = the sum of one leaf's products. `meanwhile` runs while the first block is multiplied.
  template <class Meanwhile>
  __device__ __forceinline__ void Leaf(float (&sums)[Base::kValues], int leaf,
                                       Meanwhile meanwhile) {
    struct {
      const LeafBlocks& leaves;
      int leaf;
      __device__ __forceinline__ int StepsOf(int i) const {
        return kRagged ? leaves.StepsOf(leaf, i) : 4;
      }
      __device__ __forceinline__ void Prepare(int, int) const {}
    } const ends = {leaves, leaf};
    this->Chain(sums, leaves.block[leaf + 1] - leaves.block[leaf], false, ends, meanwhile);
  }
  __device__ __forceinline__ void Leaf(float (&sums)[Base::kValues], int leaf) {
    Leaf(sums, leaf, [] {});
  }
};

// sum += b, in place: the compiler neither moves the addition nor copies the sum.
__device__ __forceinline__ void AddInPlace(float& sum, float b) {
  asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(sum) : "f"(b));
}

// AddSums: a += b; CopySums: b = a; for as many elements as b has. Volatile asm in place prevents
// the compiler from moving additions into the next leaf and from copying sums.
template <int kValues, int kCount>
__device__ __forceinline__ void AddSums(float (&a)[kValues], const float (&b)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) AddInPlace(a[i], b[i]);
}
template <int kValues, int kCount>
__device__ __forceinline__ void CopySums(float (&b)[kCount], const float (&a)[kValues]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("mov.f32 %0, %1;" : "=f"(b[i]) : "f"(a[i]));
}

// Stores the sums [kFirst, kEnd) of one thread in shared memory, in 16-byte words that no two
// threads share. AddSaved adds them again.
template <int kFirst, int kEnd, int kValues>
__device__ __forceinline__ void SaveSums(uint32_t at, const float (&sums)[kValues]) {
#pragma unroll
  for (int i = kFirst; i < kEnd; i += 4) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at + (i - kFirst) * 512),
                 "f"(sums[i]), "f"(sums[i + 1]), "f"(sums[i + 2]), "f"(sums[i + 3])
                 : "memory");
  }
}
template <int kFirst, int kEnd, int kValues>
__device__ __forceinline__ void AddSaved(float (&sums)[kValues], uint32_t at) {
#pragma unroll
  for (int i = kFirst; i < kEnd; i += 4) {
    float saved[4];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(saved[0]), "=f"(saved[1]), "=f"(saved[2]), "=f"(saved[3])
                 : "r"(at + (i - kFirst) * 512)
                 : "memory");
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[i + e] = contract::Add(sums[i + e], saved[e]);
  }
}

// Sets the registers of a warpgroup's threads: producers give up what consumers take.
__device__ __forceinline__ void BecomeProducer() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
}
template <class Size>
__device__ __forceinline__ void BecomeConsumer() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Size::kBlocks == 1 ? 240 : 104));
}

}  // namespace isobit::cuda::tile

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_CUH_
