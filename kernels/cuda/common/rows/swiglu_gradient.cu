// The gradient of SwiGLU (C12).
#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/row_columns.cuh"
#include "kernels/cuda/common/device/swiglu.cuh"
#include "kernels/cuda/common/rows/tiles.h"
#include "kernels/ops/swiglu.h"

namespace isobit::cuda {
namespace {

constexpr int kWordsOfThread = 2;

struct GateAndUp {
  float gate;
  float up;
};
// contract::GradientOfSwiGlu without its roundings; t = sigmoid(g).
__device__ __forceinline__ GateAndUp Unrounded(float g, float u, float ds, float t) {
  const float a = contract::Mul(g, t);
  return {contract::Mul(contract::Mul(ds, u), contract::Fma(a, contract::Sub(1.0f, t), t)),
          contract::Mul(ds, a)};
}

// contract::GradientOfSwiGlu of each column, without a branch for each.
template <typename Sigmoid>
__device__ __forceinline__ void GradientOfColumns(const Columns& gate, const Columns& up,
                                                  const Columns& ds, Sigmoid sigmoid,
                                                  Columns* dgate, Columns* dup) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const float g0 = LowOf(gate.pairs[i]);
    const float g1 = HighOf(gate.pairs[i]);
    const GateAndUp low = Unrounded(g0, LowOf(up.pairs[i]), LowOf(ds.pairs[i]), sigmoid(g0));
    const GateAndUp high = Unrounded(g1, HighOf(up.pairs[i]), HighOf(ds.pairs[i]), sigmoid(g1));
    dgate->pairs[i] = PackBf16(low.gate, high.gate);
    dup->pairs[i] = PackBf16(low.up, high.up);
  }
}

__global__ void __launch_bounds__(kMaxTileThreads)
    SwiGluGradientKernel(const SwiGluGradientArgs a, unsigned tiles) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const RowTile tile = TileOfBlock(tiles, kWordsOfThread);
  if (tile.row >= a.rows) return;
  const Bf16* gates = a.gate_up + tile.row * 2 * a.columns;
  const Bf16* ds = a.ds + tile.row * a.columns;
  Bf16* out = a.dgate_up + tile.row * 2 * a.columns;
  // A thread beyond the row computes its last word again: without a branch, all loads start at
  // once.
  int columns[kWordsOfThread];
  Columns gate[kWordsOfThread];
  Columns up[kWordsOfThread];
  Columns gradient[kWordsOfThread];
#pragma unroll
  for (int i = 0; i < kWordsOfThread; ++i) {
    const auto last = static_cast<int>(a.columns) - kColumns;
    columns[i] = min((tile.first + i * tile.step) * kColumns, last);
    gate[i] = LoadColumns(gates + columns[i]);
    up[i] = LoadColumns(gates + a.columns + columns[i]);
    gradient[i] = LoadColumns(ds + columns[i]);
  }
#pragma unroll
  for (int i = 0; i < kWordsOfThread; ++i) {
    Columns dgate;
    Columns dup;
    GradientOfColumns(
        gate[i], up[i], gradient[i], [](float g) { return SigmoidOfModerate(g); }, &dgate, &dup);
    float least = 0.0f;
#pragma unroll
    for (const uint32_t pair : gate[i].pairs) {
      least = fminf(least, fminf(LowOf(pair), HighOf(pair)));
    }
    if (least < kLeastModerateGate) {
      GradientOfColumns(
          gate[i], up[i], gradient[i], [](float g) { return contract::Sigmoid(g); }, &dgate, &dup);
    }
    StoreColumns(out + columns[i], dgate);
    StoreColumns(out + a.columns + columns[i], dup);
  }
}

// Any width and alignment: one column for each thread.
__global__ void __launch_bounds__(kMaxTileThreads)
    RaggedSwiGluGradientKernel(const SwiGluGradientArgs a, unsigned tiles) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const RowTile tile = TileOfBlock(tiles, 1);
  if (tile.row >= a.rows || tile.first >= a.columns) return;
  const int64_t at = tile.row * 2 * a.columns + tile.first;
  const contract::SwiGluGradient gradient = contract::GradientOfSwiGlu(
      a.gate_up[at], a.gate_up[at + a.columns], a.ds[tile.row * a.columns + tile.first]);
  a.dgate_up[at] = gradient.gate;
  a.dgate_up[at + a.columns] = gradient.up;
}

}  // namespace

absl::Status Run(const SwiGluGradientArgs& args, const Stream& stream) {
  const bool aligned =
      args.columns % kColumns == 0 && Aligned16(args.gate_up, args.ds, args.dgate_up);
  unsigned tiles = 0;
  if (!aligned) {
    const Grid grid = TileRows(args.rows, args.columns, 1, &tiles);
    return Launch(RaggedSwiGluGradientKernel, grid, stream, args, tiles);
  }
  const Grid grid = TileRows(args.rows, args.columns / kColumns, kWordsOfThread, &tiles);
  return Launch(SwiGluGradientKernel, grid, stream, args, tiles);
}

}  // namespace isobit::cuda
