// Launches of the tile kernels: which of them a schedule means, and with how many blocks.
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/sm90/device/tensor_map.h"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/cuda/sm90/linear/schedule.h"
#include "kernels/cuda/sm90/linear/tile.cuh"
#include "kernels/cuda/sm90/linear/tile.h"
#include "kernels/cuda/sm90/linear/tile_cost.h"
#include "kernels/cuda/sm90/linear/tile_kernels.h"
#include "kernels/cuda/sm90/linear/tile_table.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {
namespace {

using tile::LaunchFn;

bool AddsInTree(const LinearShape& shape, bool split) {
  return shape.sum == contract::LeafSum::kTree && (split || shape.num_leaves > 2);
}

LaunchFn FindTile(const LinearShape& shape, const LeafBlocks& leaves,
                  const TileSchedule& schedule) {
  // A consumer stores whole pairs of gates and ups.
  const int stored = schedule.columns / schedule.split / (schedule.rows == 64 ? 2 : 1);
  if (shape.gated && stored % (2 * kGateRows) != 0) return nullptr;
  const bool tree = AddsInTree(shape, schedule.split > 1);
  if (schedule.split == 1) {
    return tree ? tile::FindPersistentTree(shape.num_leaves, schedule, !leaves.uniform)
                : tile::FindPersistentChain(schedule, !leaves.uniform);
  }
  if (!leaves.uniform || shape.num_leaves % schedule.split != 0) return nullptr;
  return tree ? tile::FindSplitTree(schedule) : tile::FindSplitChain(schedule);
}

// The table's tiles that the shape can have.
std::vector<Tile> TilesOf(const LinearShape& shape) {
  std::vector<Tile> tiles;
  if (shape.k == 0 || !WholeSteps(shape)) return tiles;
  const LeafBlocks leaves = BlocksOf(shape);
  const auto add = [&](absl::Span<const Tile> from) {
    for (const Tile& tile : from) {
      if (FindTile(shape, leaves, tile.schedule) != nullptr) tiles.push_back(tile);
    }
  };
  if (AddsInTree(shape, false)) {
    add(kPersistentTreeTiles);
  } else {
    add(kPersistentChainTiles);
  }
  if (AddsInTree(shape, true)) {
    add(kSplitTreeTiles);
  } else {
    add(kSplitChainTiles);
  }
  return tiles;
}

}  // namespace

double PushTime(const LinearArgs& args) {
  return args.push == nullptr ? 0 : args.push->us_of_row * static_cast<double>(args.m);
}

TileSchedule ChooseTile(const Card& card, const LinearShape& shape, int64_t m, double push_us) {
  TileSchedule best;
  double best_time = std::numeric_limits<double>::infinity();
  for (const Tile& tile : TilesOf(shape)) {
    const double time = ExpectedTime(card, shape, m, tile, push_us);
    if (time < best_time) {
      best = tile.schedule;
      best_time = time;
    }
  }
  return best;
}

std::vector<TileSchedule> TileSchedules(const LinearShape& shape) {
  std::vector<TileSchedule> schedules;
  for (const Tile& tile : TilesOf(shape)) schedules.push_back(tile.schedule);
  return schedules;
}

absl::Status LaunchTileLinear(const LinearArgs& args, const TileSchedule& schedule,
                              const Stream& stream) {
  const LinearShape& shape = args.weight.shape;
  tile::Work work;
  work.leaves = BlocksOf(shape);
  const LaunchFn launch = FindTile(shape, work.leaves, schedule);
  if (launch == nullptr || shape.k == 0 || !WholeSteps(shape) || !Mappable(args.x, args.ldx)) {
    return absl::InvalidArgumentError(
        absl::StrCat("no tile kernel of ", schedule.rows, " rows, ", schedule.columns,
                     " columns, split ", schedule.split, ", for a weight [", shape.n, ", ", shape.k,
                     "] of ", shape.num_leaves, " leaves and x with leading dimension ", args.ldx));
  }
  if (args.m == 0 || shape.n == 0) return absl::OkStatus();
  work.weights = args.weight.packed;
  work.weight_tiles = static_cast<int32_t>(NumTiles(shape));
  work.row_tiles = static_cast<int32_t>(CeilDiv(args.m, schedule.rows));
  work.column_tiles = static_cast<int32_t>(CeilDiv(PackedRows(shape), schedule.columns));
  const auto map_x = [&](int rows) {
    return MapMatrix(args.x, args.m, shape.k, args.ldx, rows, kBlockColumns);
  };
  ISOBIT_ASSIGN_OR_RETURN(work.x, map_x(schedule.rows));
  // Copies of rows beyond x's last one are slow: with them layers of 144 rows take longer than
  // layers of 256 (docs/benchmarks/linear.md).
  work.last_x_rows = static_cast<int32_t>(RoundUp((args.m - 1) % schedule.rows + 1, 8));
  ISOBIT_ASSIGN_OR_RETURN(work.last_x, map_x(work.last_x_rows));
  work.weight_policy = work.row_tiles == 1 ? kEvictFirst : kEvictNormal;
  work.out.target = TargetOf(args);
  work.out.kind = OutputOf(args);
  work.out.vectors = tile::TakesVectors(args, work.out.target);
  return launch(work, stream);
}

}  // namespace isobit::cuda
