// Sizes of packed weights, and the packing itself.
#include "kernels/cuda/sm90/linear/layout.h"

#include <algorithm>
#include <cstring>

#include "common/base/round_up.h"

namespace isobit::cuda {

LeafBlocks BlocksOf(const LinearShape& shape) {
  LeafBlocks leaves;
  leaves.num_leaves = shape.num_leaves;
  leaves.uniform = true;
  for (int l = 0; l < shape.num_leaves; ++l) {
    const int64_t width = shape.bounds[l + 1] - shape.bounds[l];
    const int64_t blocks = std::max<int64_t>(1, CeilDiv(width, kBlockColumns));
    leaves.column[l + 1] = static_cast<int32_t>(shape.bounds[l + 1]);
    leaves.block[l + 1] = leaves.block[l] + static_cast<int32_t>(blocks);
    leaves.uniform = leaves.uniform && width > 0 && width % kBlockColumns == 0 &&
                     width == shape.bounds[1] - shape.bounds[0];
  }
  return leaves;
}

int64_t PackedRows(const LinearShape& shape) {
  if (!shape.gated) return shape.n;
  return 2 * RoundUp(shape.n / 2, kGateRows);
}

int64_t NumTiles(const LinearShape& shape) { return CeilDiv(PackedRows(shape), kTileRows); }

size_t PackedLinearBytes(const LinearShape& shape) {
  return static_cast<size_t>(NumTiles(shape)) * static_cast<size_t>(BlocksOf(shape).num_blocks()) *
         kBlockBytes;
}

void PackLinear(const LinearShape& shape, const Bf16* w, int64_t ldw, std::byte* packed) {
  std::memset(packed, 0, PackedLinearBytes(shape));
  const LeafBlocks leaves = BlocksOf(shape);
  const int64_t rows = NumTiles(shape) * kTileRows;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t source = SourceRow(shape, r);
    if (source < 0) continue;
    std::byte* tile = packed + r / kTileRows * leaves.num_blocks() * int64_t{kBlockBytes};
    const int64_t row = r % kTileRows;
    for (int l = 0; l < leaves.num_leaves; ++l) {
      for (int64_t c = leaves.column[l]; c < leaves.column[l + 1]; c += 8) {
        const int64_t inside = c - leaves.column[l];
        const int64_t chunk = inside % kBlockColumns / 8;  // of 8 columns, 16 bytes
        std::byte* to = tile + (leaves.block[l] + inside / kBlockColumns) * kBlockBytes +
                        row * kBlockColumns * int64_t{sizeof(Bf16)} + ((chunk ^ (row % 8)) * 16);
        const int64_t count = std::min<int64_t>(8, leaves.column[l + 1] - c);
        std::memcpy(to, w + source * ldw + c, static_cast<size_t>(count) * sizeof(Bf16));
      }
    }
  }
}

}  // namespace isobit::cuda
