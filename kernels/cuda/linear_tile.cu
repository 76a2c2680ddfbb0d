// See linear_tile.h.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/linear_layout.h"
#include "kernels/cuda/linear_schedule.h"
#include "kernels/cuda/linear_tile.cuh"
#include "kernels/cuda/linear_tile.h"
#include "kernels/cuda/linear_tile_kernels.h"
#include "kernels/cuda/tensor_map.h"

namespace isobit::cuda {
namespace {

using tile::LaunchFn;

LaunchFn FindKernel(const LinearShape& shape, const LeafBlocks& leaves,
                    const TileSchedule& schedule) {
  const bool tree = shape.sum == contract::LeafSum::kTree && shape.num_leaves > 2;
  if (schedule.split == 1) {
    return tree ? tile::FindPersistentTree(shape.num_leaves, schedule.columns, !leaves.uniform)
                : tile::FindPersistentChain(schedule.columns, !leaves.uniform);
  }
  if (!leaves.uniform || shape.num_leaves % schedule.split != 0) return nullptr;
  // A block finishes whole pairs of gates and ups.
  if (shape.gated && schedule.columns / schedule.split % (2 * kGateRows) != 0) return nullptr;
  return shape.sum == contract::LeafSum::kTree
             ? tile::FindSplitTree(schedule.columns, schedule.split)
             : tile::FindSplitChain(schedule.columns, schedule.split);
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Microseconds to multiply a block of K, 64 columns, in a tile. In many waves in a row what narrow
// tiles need of L2 slows them down.
double BlockTime(int columns, bool many_waves) {
  switch (columns) {
    case 64:
      return many_waves ? 0.28 : 0.165;
    case 96:
      return many_waves ? 0.30 : 0.227;
    case 128:
      return many_waves ? 0.36 : 0.314;
    default:
      return many_waves ? 0.51 : 0.463;
  }
}

// Clusters that fit on an H200 at once: they do not straddle its groups of up to 18
// multiprocessors.
int ClustersAtOnce(int split) { return split == 1 ? 132 : split == 2 ? 64 : split == 4 ? 31 : 15; }

// Microseconds that a schedule takes, roughly: a fit to measurements of 47 layers and batches on an
// H200 (2026-11-21), of which it finds the fastest schedule for all but one. In each wave a block
// multiplies its part
// of K, finishes its tile and, if the tile is split, exchanges sums.
double ExpectedTime(const LinearShape& shape, const LeafBlocks& leaves, int64_t m,
                    const TileSchedule& schedule) {
  constexpr double kLaunch = 1.4;
  constexpr double kWeightBytes = 4.0e6;  // in a microsecond
  const bool tree = shape.sum == contract::LeafSum::kTree;
  const int64_t tiles = CeilDiv(m, tile::kRows) * CeilDiv(PackedRows(shape), schedule.columns);
  const auto waves = static_cast<double>(CeilDiv(tiles, ClustersAtOnce(schedule.split)));
  const double exchange = schedule.split == 1 ? 0.0 : (tree ? 1.1 : 3.0) + 0.003 * schedule.columns;
  const double multiply =
      kLaunch +
      waves * (leaves.num_blocks() * BlockTime(schedule.columns, waves > 2) / schedule.split + 1.2 +
               0.0022 * schedule.columns + exchange);
  const double load = static_cast<double>(PackedLinearBytes(shape)) / kWeightBytes;
  return std::max(multiply, load) + 0.1 * multiply;
}

}  // namespace

TileSchedule ChooseTile(const LinearShape& shape, int64_t m) {
  const LeafBlocks leaves = BlocksOf(shape);
  TileSchedule best;
  double best_time = 0.0;
  for (const TileSchedule& schedule : TileSchedules(shape)) {
    const double time = ExpectedTime(shape, leaves, m, schedule);
    if (best_time == 0.0 || time < best_time) {
      best = schedule;
      best_time = time;
    }
  }
  return best;
}

std::vector<TileSchedule> TileSchedules(const LinearShape& shape) {
  std::vector<TileSchedule> schedules;
  if (shape.k == 0 || !WholeSteps(shape)) return schedules;
  const LeafBlocks leaves = BlocksOf(shape);
  for (const int split : {1, 2, 4, 8}) {
    for (const int columns : {64, 96, 128, 192}) {
      const TileSchedule schedule = {columns, split};
      if (FindKernel(shape, leaves, schedule) != nullptr) schedules.push_back(schedule);
    }
  }
  return schedules;
}

absl::Status LaunchTileLinear(const LinearArgs& args, const TileSchedule& schedule,
                              const Stream& stream) {
  const LinearShape& shape = args.weight.shape;
  tile::Work work;
  work.leaves = BlocksOf(shape);
  const LaunchFn launch = FindKernel(shape, work.leaves, schedule);
  if (launch == nullptr || shape.k == 0 || !WholeSteps(shape) || !Mappable(args.x, args.ldx)) {
    return absl::InvalidArgumentError(
        absl::StrCat("no tile kernel of ", schedule.columns, " columns, split ", schedule.split,
                     ", for a weight [", shape.n, ", ", shape.k, "] of ", shape.num_leaves,
                     " leaves and x with leading dimension ", args.ldx));
  }
  if (args.m == 0 || shape.n == 0) return absl::OkStatus();
  work.weights = args.weight.packed;
  work.weight_tiles = static_cast<int32_t>(NumTiles(shape));
  work.row_tiles = static_cast<int32_t>(CeilDiv(args.m, tile::kRows));
  work.column_tiles = static_cast<int32_t>(CeilDiv(PackedRows(shape), schedule.columns));
  ISOBIT_ASSIGN_OR_RETURN(work.x,
                          MapMatrix(args.x, args.m, shape.k, args.ldx, tile::kRows, kBlockColumns));
  work.weight_policy = work.row_tiles == 1 ? kEvictFirst : kEvictNormal;
  work.out.target = TargetOf(args);
  work.out.kind = OutputOf(args);
  work.out.vectors = tile::TakesVectors(args, work.out.target);
  int device = 0;
  int num_sms = 0;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  ISOBIT_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  return launch(work, num_sms, stream);
}

}  // namespace isobit::cuda
