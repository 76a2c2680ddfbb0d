// How a product of training is computed by tiles (product.cuh), as a pure function of its shape. No
// bit depends on it.
#ifndef ISOBIT_KERNELS_CUDA_LINEAR_PRODUCT_SCHEDULE_H_
#define ISOBIT_KERNELS_CUDA_LINEAR_PRODUCT_SCHEDULE_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/cuda/device/device_traits.h"
#include "kernels/training_ops.h"

namespace isobit::cuda {

struct ProductSchedule {
  int columns = 128;  // of a tile
  int cluster = 1;    // thread blocks that share the second operand: 1 or 2
  // Weight gradient: units of work that share a tile's packs; a power of two, at most the packs.
  int split = 1;

  friend bool operator==(const ProductSchedule&, const ProductSchedule&) = default;
};

// A product as its tiles see it.
struct ProductShape {
  int64_t row_tiles = 0;            // of 128 rows
  int64_t columns[kMaxParts] = {};  // of each part; no tile crosses from one to the next
  int64_t blocks = 0;               // of 64 of K
  int packs = 1;                    // whose sums combine; the most units that may share a tile
};

// Of the tiles that the product has kernels for, with split 1, and every split of its packs: the
// schedule that is expected to be fastest.
ProductSchedule ChooseProduct(const DeviceTraits& card, const ProductShape& shape,
                              absl::Span<const ProductSchedule> tiles);

// The tiles that have kernels.
inline constexpr ProductSchedule kChainTiles[] = {{64, 1}, {128, 1}, {128, 2}, {192, 2}, {208, 2}};
inline constexpr ProductSchedule kTreeTiles[] = {{64, 1}, {128, 1}, {128, 2}};
inline constexpr ProductSchedule kInputGradientTiles[] = {{64, 1}, {128, 1}, {256, 2}};
inline constexpr ProductSchedule kWeightGradientTiles[] = {{64, 1}, {128, 1}, {192, 1}, {256, 2}};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LINEAR_PRODUCT_SCHEDULE_H_
