// The tiles for which there are kernels, and what each costs: the only place that lists them.
// Kernels are instantiated from it (tile_persistent_*.cu, tile_split_*.cu), schedules chosen by it.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_TABLE_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_TABLE_H_

#include <limits>

#include "kernels/cuda/sm90/linear/tile.h"

namespace isobit::cuda {

// Microseconds. Tiles are computed in waves; a wave has as many tiles as the GPU holds at once.
struct TileCost {
  // Overhead of the first wave: launch, first operands, stores. Infinite: the tile was not measured
  // and is never chosen, except by the rules of schedule.cc and by tests.
  double first = std::numeric_limits<double>::infinity();
  double more = 0;   // overhead of each further wave
  double block = 0;  // to multiply a block of 64 columns of K
  double busy = 0;   // added to `block`, times the share of the multiprocessors that are busy
  double leaf = 0;   // of a leaf of a block: adding it to the sums, or exchanging it
};

struct Tile {
  TileSchedule schedule;
  TileCost cost;

  friend constexpr bool operator==(const Tile& tile, const TileSchedule& schedule) {
    return tile.schedule == schedule;
  }
};

// Costs are fitted by least squares, near the fastest schedules above all, to `isobit-bench gemm
// --schedules` on an H200 (2026-11-21): the layers of 8B, 32B and 0.6B at TP 1, 4 and 8.

// The leaves add in a chain, or are at most two; a block computes all of them.
inline constexpr Tile kPersistentChainTiles[] = {
    {{64, 48, 1}, {}},
    {{64, 144, 1}, {}},
    {{128, 64, 1}, {2.39, 0.44, 0.129, 0.106, 0.064}},
    {{128, 96, 1}, {2.83, 1.15, 0.183, 0.100, 0.078}},
    {{128, 128, 1}, {3.07, 1.68, 0.255, 0.111, 0.042}},
    {{128, 144, 1}, {3.35, 1.76, 0.281, 0.137, 0.039}},
    {{128, 160, 1}, {3.43, 2.12, 0.319, 0.137, 0.003}},
    {{128, 192, 1}, {3.74, 2.71, 0.402, 0.141, 0.000}},
    {{128, 208, 1}, {3.85, 2.65, 0.445, 0.150, 0.019}},
};
// The same for a tree of 4 or 8.
inline constexpr Tile kPersistentTreeTiles[] = {
    {{128, 64, 1}, {0.00, 3.16, 0.123, 0.096, 0.401}},
    {{128, 128, 1}, {1.11, 0.00, 0.269, 0.102, 0.265}},
};
// A cluster shares the leaves of a chain.
inline constexpr Tile kSplitChainTiles[] = {
    {{128, 64, 2}, {0.00, 0.36, 0.114, 0.149, 0.960}},
    {{128, 96, 2}, {0.00, 0.54, 0.180, 0.146, 1.228}},
    {{128, 128, 2}, {0.00, 0.77, 0.247, 0.154, 1.421}},
    {{128, 64, 4}, {0.40, 0.48, 0.062, 0.284, 1.748}},
    {{128, 96, 4}, {0.50, 0.51, 0.211, 0.191, 2.020}},
    {{128, 128, 4}, {0.34, 0.87, 0.215, 0.321, 2.419}},
    {{128, 128, 8}, {1.30, 1.43, 0.139, 0.647, 2.728}},
};
// A cluster shares the leaves of a tree.
inline constexpr Tile kSplitTreeTiles[] = {
    {{64, 64, 2}, {}},
    {{128, 64, 2}, {2.10, 2.96, 0.105, 0.196, 0.000}},
    {{128, 80, 2}, {2.67, 3.26, 0.133, 0.197, 0.000}},
    {{128, 96, 2}, {2.50, 2.56, 0.133, 0.249, 0.062}},
    {{128, 128, 2}, {2.96, 3.70, 0.239, 0.187, 0.047}},
    {{128, 160, 2}, {3.64, 4.21, 0.350, 0.167, 0.000}},
    {{128, 64, 4}, {0.22, 0.36, 0.111, 0.240, 1.164}},
    {{128, 128, 4}, {0.40, 0.45, 0.271, 0.216, 1.691}},
    {{128, 64, 8}, {0.83, 1.15, 0.000, 0.470, 1.980}},
    {{128, 128, 8}, {1.00, 1.37, 0.305, 0.360, 2.370}},
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_TABLE_H_
