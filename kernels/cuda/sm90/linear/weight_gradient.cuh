// The tiles of the weight gradient. Both operands are transposed: K is the token rows of dY and X.
// A pack is a segment. A unit of work is a tile and some consecutive packs, a power of two, whose
// sums are combined in the balanced tree (pending_sums.cuh).
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_WEIGHT_GRADIENT_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_WEIGHT_GRADIENT_CUH_

#include "kernels/cuda/sm90/linear/pending_sums.cuh"
#include "kernels/cuda/sm90/linear/product.cuh"
#include "kernels/ops/linear.h"

namespace isobit::cuda::tile {

// Rows of the result, divided among the stacked matrices; no tile crosses from one to the next.
struct TiledParts {
  int32_t parts = 0;
  int32_t first_tile[kMaxParts] = {};
  int32_t first_row[kMaxParts] = {};  // the column of dY
  int32_t rows[kMaxParts] = {};
  float* data[kMaxParts] = {};

  __device__ __forceinline__ int PartOf(int row_tile) const {
    int part = 0;
    while (part + 1 < parts && row_tile >= first_tile[part + 1]) ++part;
    return part;
  }
};

// The blocks of a pack of `rows` rows. The last block may have rows of the next pack, which are set
// to +0 in shared memory.
template <class Traits>
struct PackEnd {
  const typename Traits::RingT& ring;
  int consumer;
  int32_t rows;

  __device__ __forceinline__ int StepsOf(int) const { return 4; }
  __device__ __forceinline__ void Prepare(int i, int stage) const {
    const int left = rows - i * kBlockColumns;
    if (left >= kBlockColumns) return;
    // A consumer clears what it reads: its columns of dY, and all of X, as the other also does.
    const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll 1
    for (int first = 0; first < kBlockColumns; first += 16) {
      const int row = first + thread / 8;
      const uint32_t at = row * kRowBytes + thread % 8 * 16;
      if (row >= left) {
        Clear(ring.x(stage) + consumer * kBlockBytes + at);
#pragma unroll
        for (int b = 0; b < Traits::Size::kColumns / 64; ++b) {
          Clear(ring.weight(stage) + b * kBlockBytes + at);
        }
      }
      __syncwarp();
    }
    FenceSharedForAsync();
    SyncThreads(1 + consumer, 128);
  }

 private:
  static __device__ __forceinline__ void Clear(uint32_t at) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
};

// A unit's tile and packs.
struct WeightGradientUnit {
  int32_t row;  // in its matrix
  int32_t dy_column;
  int32_t column;
  int32_t part;
  int32_t group;
  int32_t first_segment;
  int32_t end_segment;
};

inline constexpr int kMaxPacks = 64;

struct WeightGradientWork {
  using XMajor = RowMajor;
  using WeightMajor = RowMajor;
  using Unit = WeightGradientUnit;
  template <int kColumns>
  static constexpr int kExtraBytes = PendingSums<kColumns / 2>::kSharedBytes;

  CUtensorMap dy;
  CUtensorMap x;
  int32_t bounds[kMaxPacks + 1] = {};
  int32_t units = 0;
  int32_t unit_packs = 1;
  TileOrder order;
  int32_t columns = 0;
  TiledParts parts;
  int64_t group_stride = 0;  // floats from a group's sums to the next group's
  bool continues = false;
  int32_t fewest_blocks = 0;  // per unit
  float4* pending = nullptr;
  int32_t levels = 0;  // of `pending`

  template <class Traits>
  __device__ __forceinline__ Unit At(int unit, int rank) const {
    const int tiles = order.rows * order.columns;
    const int group = unit / tiles;
    const TilePosition at = order.PositionOf(unit - group * tiles);
    const int row_tile = at.row_tile * Traits::kCluster + rank;
    const int part = parts.PartOf(row_tile);
    const int row = (row_tile - parts.first_tile[part]) * 128;
    return {row,
            parts.first_row[part] + row,
            at.column_tile * Traits::Size::kColumns,
            part,
            group,
            group * unit_packs,
            (group + 1) * unit_packs};
  }
  __device__ __forceinline__ int BlocksOf(int s) const {
    return (bounds[s + 1] - bounds[s] + kBlockColumns - 1) / kBlockColumns;
  }
  __device__ __forceinline__ Boxes BoxesOf(const Unit& unit, int s) const {
    return {&dy, &x, unit.dy_column, bounds[s], unit.column, bounds[s]};
  }

  // The result in the form that the epilogue takes.
  __device__ __forceinline__ TileOutput OutputOf(const Unit& unit) const {
    TileOutput out;
    out.kind = LinearOutput::kFp32;
    out.target.y = parts.data[unit.part] + unit.group * group_stride;
    out.target.ldy = columns;
    out.target.m = parts.rows[unit.part];
    out.target.n = columns;
    return out;
  }

  // sums = what the result contains.
  template <class Size>
  __device__ __forceinline__ void LoadSums(const Unit& unit, int row,
                                           float (&sums)[Size::kValues]) const {
    const int column = unit.column + 2 * (static_cast<int>(threadIdx.x) % 4);
    const float* const y = parts.data[unit.part];
#pragma unroll
    for (int i = 0; i < Size::kValues; ++i) {
      const int r = row + i / 2 % 2 * 8;
      const int c = column + i / 4 * 8 + i % 2;
      const bool inside = r < parts.rows[unit.part] && c < columns;
      sums[i] = inside ? y[int64_t{r} * columns + c] : 0.0f;
    }
  }

  template <class Traits>
  __device__ __forceinline__ void Consume(const typename Traits::RingT& ring) const {
    using Size = typename Traits::Size;
    const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    Multiplier<Size, XMajor, WeightMajor, false, typename Traits::RingT> multiplier(ring, consumer,
                                                                                    0);
    Skew<Traits> skew = {ring, fewest_blocks >= Traits::RingT::kStages, consumer};
    for (int unit = blockIdx.x / Traits::kCluster; unit < units;
         unit += gridDim.x / Traits::kCluster) {
      const Unit at = At<Traits>(unit, static_cast<int>(blockIdx.x) % Traits::kCluster);
      const int row = at.row + consumer * 64 + thread / 32 * 16 + thread % 32 / 4;
      skew.BeginUnit();
      float sums[Size::kValues];
      PendingSums<Size::kValues> waiting(pending, levels, ring.extra(), consumer);
      bool first = true;
#pragma unroll 1
      for (int s = at.first_segment; s < at.end_segment; ++s) {
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
        if (continues) LoadSums<Size>(at, row, sums);  // of the only pack
        const int blocks = BlocksOf(s);
        if (blocks > 0) {
          const PackEnd<Traits> end = {ring, consumer, bounds[s + 1] - bounds[s]};
          multiplier.Hold(sums);
          multiplier.Chain(sums, blocks, true, end, [&] {
            if (first) skew.ReleaseSecond();
            first = false;
          });
        }
        waiting.Combine(s - at.first_segment, unit_packs, sums);
      }
      StoreFp32<Size::kOctets, true, ClippedRows<float>>(OutputOf(at), sums, row, at.column / 8);
    }
  }
};

}  // namespace isobit::cuda::tile

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_WEIGHT_GRADIENT_CUH_
