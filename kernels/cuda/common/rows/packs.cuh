// The rows of packs (C10), divided into the blocks of 64 rows for column sums (C11).
#ifndef ISOBIT_KERNELS_CUDA_COMMON_ROWS_PACKS_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_ROWS_PACKS_CUH_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "kernels/contract/gradients.h"
#include "kernels/ops/packs.h"

namespace isobit::cuda {

inline constexpr int kMaxPacks = 64;

// A kernel argument. The blocks of all packs are numbered consecutively.
struct PackBlocks {
  int32_t packs = 0;
  int32_t first_block[kMaxPacks + 1] = {};  // of each pack; then the number of all blocks
  int64_t first_row[kMaxPacks + 1] = {};    // of each pack; then the end of the last

  ISOBIT_HD int32_t count() const { return first_block[packs]; }
};

// INVALID_ARGUMENT: the number of packs is not a power of two up to kMaxPacks.
inline absl::StatusOr<PackBlocks> CutIntoBlocks(PackBounds bounds) {
  const auto packs = static_cast<int64_t>(bounds.size()) - 1;
  if (packs < 1 || packs > kMaxPacks || (packs & (packs - 1)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a power of two of packs, at most ", kMaxPacks, ", got ", packs));
  }
  PackBlocks blocks;
  blocks.packs = static_cast<int32_t>(packs);
  for (int64_t p = 0; p <= packs; ++p) {
    blocks.first_row[p] = bounds[static_cast<size_t>(p)];
    if (p == 0) continue;
    const int64_t rows = blocks.first_row[p] - blocks.first_row[p - 1];
    blocks.first_block[p] = blocks.first_block[p - 1] +
                            static_cast<int32_t>(CeilDiv(rows, int64_t{contract::kColumnSumRows}));
  }
  return blocks;
}

#if defined(__CUDACC__)
struct RowBlock {
  int64_t first;
  int rows;
};
__device__ __forceinline__ RowBlock RowsOfBlock(const PackBlocks& blocks, int block) {
  int pack = 0;
  while (blocks.first_block[pack + 1] <= block) ++pack;
  const int64_t first =
      blocks.first_row[pack] + int64_t{block - blocks.first_block[pack]} * contract::kColumnSumRows;
  const int64_t left = blocks.first_row[pack + 1] - first;
  return {first, static_cast<int>(min(left, int64_t{contract::kColumnSumRows}))};
}
#endif

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_ROWS_PACKS_CUH_
