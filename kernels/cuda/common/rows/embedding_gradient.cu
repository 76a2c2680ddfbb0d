// The gradient of the embedding table: of each id, the sum of its rows' gradients (C12).
#include <cstdint>

#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/row_columns.cuh"
#include "kernels/cuda/common/rows/packs.cuh"
#include "kernels/ops/embedding.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRowsAtOnce = 8;
constexpr int kLevels = 6;  // of the tree over packs
static_assert(1 << kLevels == kMaxPacks);

// A thread's columns: kWidth of one id.
template <int kWidth>
struct Sums {
  float at[kWidth];
};

// The tree over the packs' sums, which arrive in order. Keeps one pending sum for each level.
template <int kWidth>
struct TreeOfPacks {
  Sums<kWidth> pending[kLevels];
  Sums<kWidth> total;

  __device__ __forceinline__ void Push(int pack, Sums<kWidth> sum) {
    bool carries = true;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const bool right = (pack >> level & 1) != 0;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (carries && right) sum.at[i] = contract::Add(pending[level].at[i], sum.at[i]);
        if (carries && !right) pending[level].at[i] = sum.at[i];
      }
      carries = carries && right;
    }
    total = sum;  // right after the last pack, whose number has all bits set
  }
};

__device__ __forceinline__ void LoadGradients(const Bf16* from, Sums<1>* to) {
  to->at[0] = contract::Bf16ToFloat(*from);
}
__device__ __forceinline__ void LoadGradients(const Bf16* from, Sums<4>* to) {
  const uint2 pairs = *reinterpret_cast<const uint2*>(from);
  *to = {{LowOf(pairs.x), HighOf(pairs.x), LowOf(pairs.y), HighOf(pairs.y)}};
}

__device__ __forceinline__ void LoadSums(const float* from, Sums<1>* to) { to->at[0] = *from; }
__device__ __forceinline__ void LoadSums(const float* from, Sums<4>* to) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  *to = {{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ void StoreSums(float* to, const Sums<1>& v) { *to = v.at[0]; }
__device__ __forceinline__ void StoreSums(float* to, const Sums<4>& v) {
  *reinterpret_cast<float4*>(to) = {v.at[0], v.at[1], v.at[2], v.at[3]};
}

// blockIdx.x: the id. kWidth: 4, or 1 for rows that are not whole or not aligned.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    EmbeddingGradientKernel(const EmbeddingGradientArgs a,
                            const __grid_constant__ PackBlocks packs) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kWidth;
  if (column >= a.hidden) return;
  const int64_t index = blockIdx.x;
  const int end = a.table.starts[index + 1];
  TreeOfPacks<kWidth> tree = {};
  int pack = 0;
  Sums<kWidth> sum;
  const auto open = [&] {
    sum = {};
    if (a.head_sums == nullptr || pack >= packs.packs) return;
    const float* head = a.head_sums + (pack * a.table.num_ids + index) * a.hidden + column;
    LoadSums(head, &sum);
  };
  // Ends the packs before that of `row`.
  const auto go_to = [&](int64_t row) {
    while (pack < packs.packs && row >= packs.first_row[pack + 1]) {
      tree.Push(pack++, sum);
      open();
    }
  };
  open();
  for (int next = a.table.starts[index]; next < end; next += kRowsAtOnce) {
    int32_t rows[kRowsAtOnce];
    Sums<kWidth> values[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) rows[i] = next + i < end ? a.table.rows[next + i] : 0;
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (next + i < end) {
        LoadGradients(a.dy + int64_t{rows[i]} * a.hidden + column, &values[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (next + i >= end) continue;
      go_to(rows[i]);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) sum.at[c] = contract::Add(sum.at[c], values[i].at[c]);
    }
  }
  go_to(packs.first_row[packs.packs]);
  StoreSums(a.dtable + a.table.ids[index] * a.hidden + column, tree.total);
}

}  // namespace

absl::Status Run(const EmbeddingGradientArgs& args, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const PackBlocks packs, CutIntoBlocks(args.packs));
  const bool aligned =
      args.hidden % 4 == 0 && Aligned16(args.dy) && Aligned16(args.head_sums, args.dtable);
  const int64_t columns_of_block = int64_t{kThreads} * (aligned ? 4 : 1);
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(args.table.num_ids),
                                    static_cast<unsigned>(CeilDiv(args.hidden, columns_of_block))),
                     .threads = dim3(kThreads)};
  return Launch(aligned ? EmbeddingGradientKernel<4> : EmbeddingGradientKernel<1>, grid, stream,
                args, packs);
}

}  // namespace isobit::cuda
