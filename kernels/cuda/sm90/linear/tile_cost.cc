// The model behind the expected times of tiles.
#include "kernels/cuda/sm90/linear/tile_cost.h"

#include <algorithm>
#include <cmath>

#include "common/base/round_up.h"
#include "kernels/cuda/sm90/linear/layout.h"

namespace isobit::cuda {

double ExpectedTime(const Card& card, const LinearShape& shape, int64_t m, const Tile& tile,
                    double push_us) {
  const TileSchedule& schedule = tile.schedule;
  const TileCost& cost = tile.cost;
  const int64_t tiles = CeilDiv(m, schedule.rows) * CeilDiv(PackedRows(shape), schedule.columns);
  const int64_t at_once = card.ClustersAtOnce(schedule.split);
  const auto waves = static_cast<double>(CeilDiv(tiles, at_once));
  const double blocks = static_cast<double>(BlocksOf(shape).num_blocks()) / schedule.split;
  const double busy =
      static_cast<double>(tiles * schedule.split) / static_cast<double>(card.multiprocessors);
  const double multiply = cost.first + cost.more * (waves - 1) +
                          blocks * (cost.block * waves + cost.busy * busy) +
                          cost.leaf * waves * shape.num_leaves / schedule.split;
  const double load = static_cast<double>(PackedLinearBytes(shape)) / card.memory_bytes_per_us;
  // Loading and multiplying overlap; the more equal their times are, the less they overlap.
  const auto fourth = [](double x) { return x * x * (x * x); };
  const double time = std::sqrt(std::sqrt(fourth(multiply) + fourth(load)));
  // A wave's sums travel while the next wave is multiplied, the last wave's after it.
  const double before =
      push_us * (waves - 1) * static_cast<double>(at_once) / static_cast<double>(tiles);
  return std::max(time, time / waves + before) + push_us - before;
}

}  // namespace isobit::cuda
