// How tiles compute a product of training (product.cuh): a pure function of its shape, which
// affects no bit.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_PRODUCT_SCHEDULE_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_PRODUCT_SCHEDULE_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/cuda/common/device/card.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {

struct ProductSchedule {
  int columns = 128;  // per tile
  int cluster = 1;    // thread blocks that share the second operand: 1 or 2
  // Weight gradient: units of work that share a tile's packs; a power of two, at most that number.
  int split = 1;

  friend bool operator==(const ProductSchedule&, const ProductSchedule&) = default;
};

// A product's shape in units of its tiles.
struct ProductShape {
  int64_t row_tiles = 0;            // of 128 rows
  int64_t columns[kMaxParts] = {};  // of each stacked matrix; no tile crosses from one to the next
  int64_t blocks = 0;               // of 64 of K
  int packs = 1;                    // whose sums are combined; also the most units on one tile
};

// The schedule expected to be fastest, among the given `tiles`, for which there are kernels and
// whose split is 1, and all ways to split the product's packs.
ProductSchedule ChooseProduct(const Card& card, const ProductShape& shape,
                              absl::Span<const ProductSchedule> tiles);

// The tiles for which there are kernels.
inline constexpr ProductSchedule kChainTiles[] = {{64, 1}, {128, 1}, {128, 2}, {192, 2}, {208, 2}};
inline constexpr ProductSchedule kTreeTiles[] = {{64, 1}, {128, 1}, {128, 2}};
inline constexpr ProductSchedule kInputGradientTiles[] = {{64, 1}, {128, 1}, {256, 2}};
inline constexpr ProductSchedule kWeightGradientTiles[] = {{64, 1}, {128, 1}, {192, 1}, {256, 2}};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_PRODUCT_SCHEDULE_H_
