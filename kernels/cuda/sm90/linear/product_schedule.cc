// Measured times of tiles, and the choice of the fastest.
#include "kernels/cuda/sm90/linear/product_schedule.h"

#include <algorithm>
#include <limits>

#include "common/base/round_up.h"

namespace isobit::cuda {
namespace {

// What a tile costs, in the time of a block of 64 of K of a tile of 256 columns: from an H200
// (2026-11-23), on the layers of 8B and 32B.
struct TileTime {
  int columns;
  int cluster;
  double block;     // to multiply a block of K
  double ends;      // of a tile: its first operands, its stores
  double pack_end;  // to combine a pack's sum with those before it, if there is more than one
};
constexpr TileTime kTimes[] = {{64, 1, 0.40, 2.5, 0.3},  {128, 1, 0.52, 3.0, 1.1},
                               {128, 2, 0.50, 3.0, 0.0}, {192, 1, 0.77, 3.5, 4.0},
                               {192, 2, 0.77, 3.5, 0.0}, {208, 2, 0.82, 3.6, 0.0},
                               {256, 2, 1.00, 4.0, 6.3}};

// The sums of a split are written and read once more, by another kernel.
double SplitTime(const ProductShape& shape, int64_t columns, int split) {
  if (split == 1) return 0.0;
  return 4.0 + 1e-6 * static_cast<double>(shape.row_tiles * 128 * columns) * split;
}

double ExpectedTime(const Card& card, const ProductShape& shape, const ProductSchedule& schedule) {
  const TileTime& tile = *std::ranges::find_if(kTimes, [&](const TileTime& t) {
    return t.columns == schedule.columns && t.cluster == schedule.cluster;
  });
  int64_t column_tiles = 0;
  int64_t columns = 0;
  for (const int64_t part : shape.columns) {
    column_tiles += CeilDiv(part, schedule.columns);
    columns += part;
  }
  const int64_t units = CeilDiv(shape.row_tiles, schedule.cluster) * column_tiles * schedule.split;
  const int64_t at_once = card.ClustersAtOnce(schedule.cluster);
  const auto waves = static_cast<double>(CeilDiv(units, at_once));
  const double packs = static_cast<double>(shape.packs) / schedule.split;
  const double of_unit = static_cast<double>(shape.blocks) / schedule.split * tile.block +
                         tile.ends + (packs > 1 ? packs * tile.pack_end : 0.0);
  return waves * of_unit + SplitTime(shape, columns, schedule.split);
}

}  // namespace

ProductSchedule ChooseProduct(const Card& card, const ProductShape& shape,
                              absl::Span<const ProductSchedule> tiles) {
  ProductSchedule best;
  double best_time = std::numeric_limits<double>::infinity();
  for (ProductSchedule schedule : tiles) {
    for (schedule.split = 1; schedule.split <= shape.packs; schedule.split *= 2) {
      const double time = ExpectedTime(card, shape, schedule);
      // Of equals the later one: larger tiles and clusters read less.
      if (time > best_time) continue;
      best_time = time;
      best = schedule;
    }
  }
  return best;
}

}  // namespace isobit::cuda
