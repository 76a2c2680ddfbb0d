// See tile_cost.h.
#include "kernels/cuda/linear/tile_cost.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/base/round_up.h"
#include "kernels/cuda/linear/layout.h"

namespace isobit::cuda {
namespace {

// Microseconds. Tiles are computed in waves; a wave has as many tiles as the GPU holds at once.
struct TileCost {
  TileSchedule schedule;
  bool tree;     // a tree of more than two leaves, or split: the sums are added in another way
  double first;  // overhead of the first wave: launch, first operands, stores
  double more;   // overhead of each further wave
  double block;  // to multiply a block of 64 columns of K
  double busy;   // added to `block`, times the share of the multiprocessors that are busy
  double leaf;   // of a leaf of a block: adding it to the sums, or exchanging it
};

// Fitted by least squares, near the fastest schedules above all, to `isobit-bench gemm --schedules`
// on an H200 (2026-11-21): the layers of 8B, 32B and 0.6B at TP 1, 4 and 8.
constexpr TileCost kCosts[] = {
    {{128, 64, 1}, false, 2.39, 0.44, 0.129, 0.106, 0.064},
    {{128, 64, 2}, false, 0.00, 0.36, 0.114, 0.149, 0.960},
    {{128, 64, 4}, false, 0.40, 0.48, 0.062, 0.284, 1.748},
    {{128, 96, 1}, false, 2.83, 1.15, 0.183, 0.100, 0.078},
    {{128, 96, 2}, false, 0.00, 0.54, 0.180, 0.146, 1.228},
    {{128, 96, 4}, false, 0.50, 0.51, 0.211, 0.191, 2.020},
    {{128, 128, 1}, false, 3.07, 1.68, 0.255, 0.111, 0.042},
    {{128, 128, 2}, false, 0.00, 0.77, 0.247, 0.154, 1.421},
    {{128, 128, 4}, false, 0.34, 0.87, 0.215, 0.321, 2.419},
    {{128, 128, 8}, false, 1.30, 1.43, 0.139, 0.647, 2.728},
    {{128, 144, 1}, false, 3.35, 1.76, 0.281, 0.137, 0.039},
    {{128, 160, 1}, false, 3.43, 2.12, 0.319, 0.137, 0.003},
    {{128, 192, 1}, false, 3.74, 2.71, 0.402, 0.141, 0.000},
    {{128, 208, 1}, false, 3.85, 2.65, 0.445, 0.150, 0.019},
    {{128, 64, 1}, true, 0.00, 3.16, 0.123, 0.096, 0.401},
    {{128, 64, 2}, true, 2.10, 2.96, 0.105, 0.196, 0.000},
    {{128, 64, 4}, true, 0.22, 0.36, 0.111, 0.240, 1.164},
    {{128, 64, 8}, true, 0.83, 1.15, 0.000, 0.470, 1.980},
    {{128, 80, 2}, true, 2.67, 3.26, 0.133, 0.197, 0.000},
    {{128, 96, 2}, true, 2.50, 2.56, 0.133, 0.249, 0.062},
    {{128, 128, 1}, true, 1.11, 0.00, 0.269, 0.102, 0.265},
    {{128, 128, 2}, true, 2.96, 3.70, 0.239, 0.187, 0.047},
    {{128, 128, 4}, true, 0.40, 0.45, 0.271, 0.216, 1.691},
    {{128, 128, 8}, true, 1.00, 1.37, 0.305, 0.360, 2.370},
    {{128, 160, 2}, true, 3.64, 4.21, 0.350, 0.167, 0.000},
};

}  // namespace

double ExpectedTime(const Card& card, const LinearShape& shape, int64_t m,
                    const TileSchedule& schedule, double push_us) {
  const bool tree =
      shape.sum == contract::LeafSum::kTree && (schedule.split > 1 || shape.num_leaves > 2);
  const auto* const cost = std::ranges::find_if(
      kCosts, [&](const TileCost& c) { return c.schedule == schedule && c.tree == tree; });
  if (cost == std::end(kCosts)) return std::numeric_limits<double>::infinity();
  const int64_t tiles = CeilDiv(m, schedule.rows) * CeilDiv(PackedRows(shape), schedule.columns);
  const int64_t at_once = card.ClustersAtOnce(schedule.split);
  const auto waves = static_cast<double>(CeilDiv(tiles, at_once));
  const double blocks = static_cast<double>(BlocksOf(shape).num_blocks()) / schedule.split;
  const double busy =
      static_cast<double>(tiles * schedule.split) / static_cast<double>(card.multiprocessors);
  const double multiply = cost->first + cost->more * (waves - 1) +
                          blocks * (cost->block * waves + cost->busy * busy) +
                          cost->leaf * waves * shape.num_leaves / schedule.split;
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
