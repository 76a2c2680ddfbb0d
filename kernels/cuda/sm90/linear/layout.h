// The layout of a weight matrix in GPU memory: only one, made at load, which every schedule reads.
//
// W [n, k] is divided into row tiles of 64 rows and, within each leaf, into blocks of 64 columns. A
// leaf's last block is filled with +0; an empty leaf has one block of +0. Block (t, b) is 8192
// consecutive bytes at (t * num_blocks + b) * 8192: its 64 x 64 bf16 in the order of the 128-byte
// swizzle, which wgmma reads from shared memory as a K-major operand. So one plain bulk copy can
// fetch any number of blocks, a row tile is contiguous over K, no tensor map is needed, and no leaf
// boundary is within a block. Rows 8g .. 8g+7 of a block are its bytes [1024 g, 1024 (g + 1)), so a
// copy can fetch any multiple of 8 rows.
//
// A gated shape (gate_up_proj: n/2 gates, then n/2 ups) interleaves its rows by 8: gates 0-7, ups
// 0-7, gates 8-15, ups 8-15, ...; incomplete groups of 8 are filled with rows of +0. A gate and its
// up are then in the same thread's accumulators, whichever operand the weights are.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_LAYOUT_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/contract/portable.h"
#include "kernels/ops/linear_shape.h"

namespace isobit::cuda {

inline constexpr int kTileRows = 64;
inline constexpr int kBlockColumns = 64;
inline constexpr int kBlockBytes = kTileRows * kBlockColumns * static_cast<int>(sizeof(Bf16));
inline constexpr int kGateRows = 8;  // rows of a run of gates or ups

// The leaves as used by the kernels; passed by value.
struct LeafBlocks {
  int32_t num_leaves = 0;
  int32_t column[contract::kLeaves + 1] =
      {};  // leaf l multiplies x's columns [column[l], column[l+1])
  int32_t block[contract::kLeaves + 1] = {};  // by its blocks [block[l], block[l+1])
  ISOBIT_HD int32_t num_blocks() const { return block[num_leaves]; }
  // Every leaf has the same whole number of blocks, so no k16 step is ever left out.
  bool uniform = false;

  // k16 steps of leaf l's block number i (from 0): 4, or fewer in its last one; 0 in an empty leaf.
  ISOBIT_HD int StepsOf(int l, int i) const {
    const int left = column[l + 1] - column[l] - i * kBlockColumns;
    const int steps = (left + contract::kMmaK - 1) / contract::kMmaK;
    return steps < 4 ? steps : 4;
  }
};
LeafBlocks BlocksOf(const LinearShape& shape);

// Rows of the packed matrix: n; if gated, the gates and the ups are each padded to a multiple of 8.
int64_t PackedRows(const LinearShape& shape);
// The number of row tiles.
int64_t NumTiles(const LinearShape& shape);
// The row of W at a packed row; -1: padding.
ISOBIT_HD int64_t SourceRow(const LinearShape& shape, int64_t packed_row) {
  if (!shape.gated) return packed_row < shape.n ? packed_row : -1;
  const int64_t half = shape.n / 2;
  const int64_t column = packed_row / (2 * kGateRows) * kGateRows + packed_row % kGateRows;
  if (column >= half) return -1;
  return packed_row / kGateRows % 2 == 0 ? column : half + column;
}

size_t PackedLinearBytes(const LinearShape& shape);
// w: [n, k], leading dimension ldw, in host memory; packed: PackedLinearBytes(shape) bytes there.
void PackLinear(const LinearShape& shape, const Bf16* w, int64_t ldw, std::byte* packed);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_LAYOUT_H_
