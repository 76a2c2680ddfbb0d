// The tiles of a linear layer on row-major weights. The weight may be up to three stacked matrices;
// no tile crosses from one to the next.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_MAPPED_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_MAPPED_CUH_

#include "kernels/contract/portable.h"
#include "kernels/cuda/sm90/linear/product.cuh"
#include "kernels/cuda/sm90/linear/product_schedule.h"
#include "kernels/cuda/sm90/linear/tile_persistent.cuh"
#include "kernels/ops/linear.h"

namespace isobit::cuda::tile {

// Two neighbouring columns of AddResidual: delta = bf16(sum + bias).
__device__ __forceinline__ uint32_t AddResidualPair(uint32_t residual, uint32_t delta) {
  using contract::Add;
  return PackBf16(
      Add(contract::FromBits(residual << 16), contract::FromBits(delta << 16)),
      Add(contract::FromBits(residual & 0xffff0000u), contract::FromBits(delta & 0xffff0000u)));
}

// y = AddResidual(residual, sum, bias).
struct ResidualOutput : TileOutput {
  const Bf16* residual = nullptr;  // as y
};

// OutputRows that add the residual to what they store. The same thread reads and writes an element,
// so y may be the residual.
struct ResidualRows : OutputRows<Bf16> {
  const Bf16* residual;  // of `upper`
  int64_t below;         // elements from a thread's upper row to its lower one

  __device__ __forceinline__ ResidualRows(const ResidualOutput& out, int row, int column)
      : OutputRows<Bf16>(out, row, column),
        residual(out.residual + row * out.target.ldy + column),
        below(8 * out.target.ldy) {}

  template <bool kWhole>
  __device__ __forceinline__ void Store(int at, int count, uint4 high, uint4 low) {
    Join<kWhole>(residual + at, has_upper ? count : 0, high);
    Join<kWhole>(residual + below + at, has_lower ? count : 0, low);
    OutputRows<Bf16>::Store<kWhole>(at, count, high, low);
  }

 private:
  template <bool kWhole>
  static __device__ __forceinline__ void Join(const Bf16* from, int count, uint4& octet) {
    uint32_t old[4] = {};
    if (kWhole) {
      if (count == 0) return;
      const uint4 words = *reinterpret_cast<const uint4*>(from);
      old[0] = words.x, old[1] = words.y, old[2] = words.z, old[3] = words.w;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) old[i / 2] |= uint32_t{from[i]} << (i % 2 * 16);
      }
    }
    octet = make_uint4(AddResidualPair(old[0], octet.x), AddResidualPair(old[1], octet.y),
                       AddResidualPair(old[2], octet.z), AddResidualPair(old[3], octet.w));
  }
};

// A unit's tile.
struct MappedUnit {
  int32_t row;
  int32_t part;
  int32_t weight_row;  // in its part
  int32_t first_segment;
  int32_t end_segment;
};

// The kernels' parameter. A segment is a leaf.
template <Sums kSums>
struct MappedWork {
  using XMajor = KMajor;
  using WeightMajor = KMajor;
  using Unit = MappedUnit;
  // The tree of 8 keeps its left half's sum here while the right half is computed.
  template <int kColumns>
  static constexpr int kExtraBytes = kSums == Sums::kTree8
                                         ? 128 * kColumns* static_cast<int>(sizeof(float))
                                         : 0;

  CUtensorMap x;
  CUtensorMap weights[kMaxParts];
  LeafBlocks leaves;
  TileOutput out;
  const Bf16* residual = nullptr;  // as y, or null
  TileOrder order;
  int32_t units = 0;
  int32_t parts = 0;
  int32_t first_tile[kMaxParts] = {};        // column tile
  int32_t first_column[kMaxParts + 1] = {};  // of y; all but the end are multiples of 8

  template <class Traits>
  __device__ __forceinline__ Unit At(int unit, int rank) const {
    const TilePosition at = order.PositionOf(unit);
    int part = 0;
    while (part + 1 < parts && at.column_tile >= first_tile[part + 1]) ++part;
    return {(at.row_tile * Traits::kCluster + rank) * 128, part,
            (at.column_tile - first_tile[part]) * Traits::Size::kColumns, 0, leaves.num_leaves};
  }
  __device__ __forceinline__ int BlocksOf(int leaf) const {
    return leaves.block[leaf + 1] - leaves.block[leaf];
  }
  // An empty leaf's block multiplies zeros, so it does not matter what is copied.
  __device__ __forceinline__ Boxes BoxesOf(const Unit& unit, int leaf) const {
    return {&x,
            &weights[unit.part],
            unit.row,
            leaves.column[leaf],
            unit.weight_row,
            leaves.column[leaf]};
  }

  template <class Traits>
  __device__ __forceinline__ void Consume(const typename Traits::RingT& ring) const {
    using Size = typename Traits::Size;
    const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    LeafMultiplier<Size, Traits::kRagged, typename Traits::RingT> multiplier(leaves, ring, consumer,
                                                                             ring.extra());
    const uint32_t left = ring.extra() + Traits::kZeroBytes +
                          consumer * (kExtraBytes<Size::kColumns> / 2) + thread * 16;
    Skew<Traits> skew = {ring, leaves.num_blocks() >= Traits::RingT::kStages, consumer};
    for (int unit = blockIdx.x / Traits::kCluster; unit < units;
         unit += gridDim.x / Traits::kCluster) {
      const Unit at = At<Traits>(unit, static_cast<int>(blockIdx.x) % Traits::kCluster);
      skew.BeginUnit();
      float sums[Size::kValues];
      SumLeaves<kSums>(multiplier, leaves.num_leaves, left, sums, [&] { skew.ReleaseSecond(); });
      Store<Size>(at, sums, at.row + consumer * 64 + thread / 32 * 16 + thread % 32 / 4);
    }
  }

 private:
  // Stores a consumer's sums for a tile.
  template <class Size>
  __device__ __forceinline__ void Store(const Unit& at, float (&sums)[Size::kValues],
                                        int row) const {
    constexpr int kOctets = Size::kOctets;
    const int column = first_column[at.part] + at.weight_row;
    const int octet = column / 8;
    ResidualOutput output = {out, residual};
    output.target.n = first_column[at.part + 1];
    const bool whole = output.vectors && column + Size::kColumns <= output.target.n;
    if (output.target.bias != nullptr) AddBias<kOctets>(output, sums, octet);
    if (output.kind == LinearOutput::kFp32) {
      if (whole) {
        StoreFp32<kOctets, true>(output, sums, row, octet);
      } else {
        StoreFp32<kOctets, false>(output, sums, row, octet);
      }
    } else if (residual != nullptr) {
      if (whole) {
        StoreBf16<kOctets, 1, true, ResidualRows>(output, sums, row, octet);
      } else {
        StoreBf16<kOctets, 1, false, ResidualRows>(output, sums, row, octet);
      }
    } else if (whole) {
      StoreBf16<kOctets, 1, true>(output, sums, row, octet);
    } else {
      StoreBf16<kOctets, 1, false>(output, sums, row, octet);
    }
  }
};

using ChainWork = MappedWork<Sums::kChain>;
using TreeWork = MappedWork<Sums::kTree8>;
template <class Work>
using MappedLaunchFn = absl::Status (*)(const Work& work, const Stream& stream);

// The only tile of leaves that are not uniform.
inline constexpr ProductSchedule kRaggedProduct = {128, 1};

// Null: there is no such kernel. `ragged`: the leaves are not uniform (LeafBlocks).
MappedLaunchFn<ChainWork> FindMapped(const ChainWork& work, const ProductSchedule& schedule,
                                     bool ragged);
MappedLaunchFn<TreeWork> FindMapped(const TreeWork& work, const ProductSchedule& schedule,
                                    bool ragged);

}  // namespace isobit::cuda::tile

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_MAPPED_CUH_
