// The launch of the tiles, their workspace, and the kernel that adds groups of packs.
#include <algorithm>
#include <bit>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/device/tensor_map.h"
#include "kernels/cuda/sm90/linear/find_kernel.h"
#include "kernels/cuda/sm90/linear/general_product.h"
#include "kernels/cuda/sm90/linear/weight_gradient.cuh"
#include "kernels/cuda/sm90/linear/weight_gradient.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {
namespace {

using tile::kMaxPacks;

struct Kernels {
  using LaunchFn = absl::Status (*)(const tile::WeightGradientWork&, const Stream&);
  template <size_t kIndex>
  static constexpr LaunchFn Launcher() {
    constexpr ProductSchedule schedule = kWeightGradientTiles[kIndex];
    return tile::LaunchChains<
        tile::ProductTraits<tile::WeightGradientWork, schedule.columns, false, schedule.cluster>>;
  }
};

// Null: there is no such kernel. All splits have the same one.
Kernels::LaunchFn FindTile(ProductSchedule schedule) {
  schedule.split = 1;
  return FindKernel<kWeightGradientTiles, Kernels>(schedule);
}

constexpr int kTreeThreads = 256;

int PacksOf(const WeightGradientArgs& args) { return static_cast<int>(args.packs.size()) - 1; }

int64_t RowsOf(const WeightGradientArgs& args) {
  int64_t rows = 0;
  for (int i = 0; i < args.parts; ++i) rows += args.part_rows[i];
  return rows;
}
int64_t RowTilesOf(const WeightGradientArgs& args) {
  int64_t tiles = 0;
  for (int i = 0; i < args.parts; ++i) tiles += CeilDiv(args.part_rows[i], 128);
  return tiles;
}
int64_t BlocksOf(const WeightGradientArgs& args, int first_pack, int end_pack) {
  int64_t blocks = 0;
  for (int s = first_pack; s < end_pack; ++s) {
    const auto at = static_cast<size_t>(s);
    blocks += CeilDiv(args.packs[at + 1] - args.packs[at], kBlockColumns);
  }
  return blocks;
}

// Where the sums of a split's units wait for AddGroups: a matrix of all rows for each.
size_t GroupBytes(const ProductSchedule& schedule, const WeightGradientArgs& args) {
  if (schedule.split == 1) return 0;
  return static_cast<size_t>(schedule.split * RowsOf(args) * args.columns) * sizeof(float);
}
// Levels of the tree whose pending sums wait in memory.
int LevelsOf(const ProductSchedule& schedule, const WeightGradientArgs& args) {
  const int levels = std::bit_width(static_cast<unsigned>(PacksOf(args) / schedule.split)) - 1;
  return std::max(0, levels - tile::LevelsOnChip(schedule.columns));
}

absl::Status CheckPacks(const WeightGradientArgs& args) {
  const int packs = PacksOf(args);
  if (packs >= 1 && packs <= kMaxPacks && std::has_single_bit(static_cast<unsigned>(packs)) &&
      !(args.continues && packs != 1)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("weight gradient: expected a power of two of packs up to ", kMaxPacks,
                   ", and one if it continues; got ", packs));
}

// out[i] = the tree over the groups' values number i.
struct GroupSum {
  const float* sums;
  int64_t stride;  // from group to group
  int32_t groups;
  tile::TiledParts parts;
  int64_t columns;
};
__global__ void __launch_bounds__(kTreeThreads) AddGroups(const __grid_constant__ GroupSum p) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int part = static_cast<int>(blockIdx.y);
  const int64_t count = p.parts.rows[part] * p.columns;
  const float* const sums = p.sums + p.parts.first_row[part] * p.columns;
  for (int64_t i = int64_t{blockIdx.x} * kTreeThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kTreeThreads) {
    float pending[7];
    float sum = 0.0f;
    for (int group = 0; group < p.groups; ++group) {
      sum = __ldcg(sums + group * p.stride + i);
      int level = 0;
      for (; (group >> level & 1) != 0; ++level) sum = contract::Add(pending[level], sum);
      pending[level] = sum;
    }
    p.parts.data[part][i] = sum;
  }
}

tile::TiledParts PartsOf(const WeightGradientArgs& args) {
  tile::TiledParts parts;
  int32_t row_tiles = 0;
  int32_t first_row = 0;
  for (int i = 0; i < args.parts; ++i) {
    if (args.part_rows[i] == 0) continue;
    const int part = parts.parts++;
    parts.first_tile[part] = row_tiles;
    parts.first_row[part] = first_row;
    parts.rows[part] = static_cast<int32_t>(args.part_rows[i]);
    parts.data[part] = args.dw[i];
    row_tiles += static_cast<int32_t>(CeilDiv(args.part_rows[i], 128));
    first_row += parts.rows[part];
  }
  return parts;
}

// The kernels' parameter, but for the results of a split.
absl::StatusOr<tile::WeightGradientWork> WorkOf(const ProductSchedule& schedule,
                                                const WeightGradientArgs& args) {
  tile::WeightGradientWork work;
  const int packs = PacksOf(args);
  const int64_t rows = RowsOf(args);
  const int64_t tokens = args.packs.back();
  if (tokens > 0) {
    ISOBIT_ASSIGN_OR_RETURN(
        work.dy, MapMatrix(args.dy, tokens, rows, args.lddy, kBlockColumns, kBlockColumns));
    ISOBIT_ASSIGN_OR_RETURN(
        work.x, MapMatrix(args.x, tokens, args.columns, args.ldx, kBlockColumns, kBlockColumns));
  }
  std::ranges::copy(args.packs, work.bounds);
  work.parts = PartsOf(args);
  work.columns = static_cast<int32_t>(args.columns);
  work.continues = args.continues;
  work.levels = LevelsOf(schedule, args);
  work.unit_packs = packs / schedule.split;
  work.order.rows = static_cast<int32_t>(CeilDiv(RowTilesOf(args), schedule.cluster));
  work.order.columns = static_cast<int32_t>(CeilDiv(args.columns, schedule.columns));
  work.order.band = tile::kBandTiles / schedule.cluster;
  work.units = work.order.rows * work.order.columns * schedule.split;
  work.fewest_blocks = std::numeric_limits<int32_t>::max();
  for (int first = 0; first < packs; first += work.unit_packs) {
    const int64_t blocks = BlocksOf(args, first, first + work.unit_packs);
    work.fewest_blocks = std::min(work.fewest_blocks, static_cast<int32_t>(blocks));
  }
  return work;
}

absl::Status LaunchTiles(const ProductSchedule& schedule, const WeightGradientArgs& args,
                         std::byte* workspace, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(tile::WeightGradientWork work, WorkOf(schedule, args));
  const tile::TiledParts parts = work.parts;
  float* const group_sums = reinterpret_cast<float*>(workspace);
  work.pending = reinterpret_cast<float4*>(workspace + GroupBytes(schedule, args));
  if (schedule.split > 1) {
    work.group_stride = RowsOf(args) * args.columns;
    for (int i = 0; i < parts.parts; ++i) {
      work.parts.data[i] = group_sums + parts.first_row[i] * args.columns;
    }
  }
  const Kernels::LaunchFn launch = FindTile(schedule);
  ISOBIT_RETURN_IF_ERROR(launch(work, stream));
  if (schedule.split == 1) return absl::OkStatus();
  const int64_t blocks = CeilDiv(RowsOf(args) * args.columns, kTreeThreads);
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, 1056)),
                                    static_cast<unsigned>(parts.parts)),
                     .threads = dim3(kTreeThreads)};
  return Launch(&AddGroups, grid, stream,
                GroupSum{group_sums, work.group_stride, schedule.split, parts, args.columns});
}

ProductSchedule ScheduleOf(const Card& card, const WeightGradientArgs& args) {
  const ProductShape shape = {.row_tiles = RowTilesOf(args),
                              .columns = {args.columns},
                              .blocks = BlocksOf(args, 0, PacksOf(args)),
                              .packs = PacksOf(args)};
  return ChooseProduct(card, shape, kWeightGradientTiles);
}

bool IsEmpty(const WeightGradientArgs& args) { return RowsOf(args) == 0 || args.columns == 0; }

}  // namespace

bool HasWeightGradientTiles(const WeightGradientArgs& args) {
  bool fits = Mappable(args.dy, args.lddy) && Mappable(args.x, args.ldx) && args.columns % 4 == 0;
  int64_t first_row = 0;  // the column of dY at which a part begins
  for (int i = 0; i < args.parts; ++i) {
    if (args.part_rows[i] == 0) continue;
    fits = fits && reinterpret_cast<uintptr_t>(args.dw[i]) % 16 == 0 && first_row % kBoxStart == 0;
    first_row += args.part_rows[i];
  }
  return fits;
}

size_t WorkspaceBytesAs(const Card& card, const ProductSchedule& schedule,
                        const WeightGradientArgs& args) {
  const size_t pending =
      static_cast<size_t>(card.ClustersAtOnce(schedule.cluster) * schedule.cluster) *
      static_cast<size_t>(LevelsOf(schedule, args) * 128 * schedule.columns) * sizeof(float);
  return RoundUp(GroupBytes(schedule, args), size_t{16}) + pending;
}

absl::Status LaunchWeightGradientAs(const ProductSchedule& schedule, const WeightGradientArgs& args,
                                    std::byte* workspace, const Stream& stream) {
  ISOBIT_RETURN_IF_ERROR(CheckPacks(args));
  const bool exists =
      FindTile(schedule) != nullptr && schedule.split >= 1 && PacksOf(args) % schedule.split == 0;
  if (!exists || !HasWeightGradientTiles(args)) {
    return absl::InvalidArgumentError(
        absl::StrCat("no kernel of ", schedule.columns, " columns, cluster ", schedule.cluster,
                     ", split ", schedule.split, ", for the weight gradient of ", PacksOf(args),
                     " packs with leading dimensions ", args.lddy, " and ", args.ldx));
  }
  return LaunchTiles(schedule, args, workspace, stream);
}

absl::Status LaunchGeneralWeightGradient(const WeightGradientArgs& args, const Stream& stream) {
  ISOBIT_RETURN_IF_ERROR(CheckPacks(args));
  GeneralProduct product = {.rows = RowsOf(args),
                            .columns = args.columns,
                            .a = args.dy,
                            .a_row = 1,
                            .a_k = args.lddy,
                            .ldb = args.ldx,
                            .b_transposed = true,
                            .segments = PacksOf(args),
                            .combine = contract::LeafSum::kTree,
                            .continues = args.continues};
  product.b.data[0] = args.x;
  std::copy(args.packs.begin(), args.packs.end(), product.bounds);
  product.fp32_out.parts = args.parts;
  for (int i = 0; i < args.parts; ++i) {
    product.fp32_out.data[i] = args.dw[i];
    product.fp32_out.bounds[i + 1] = product.fp32_out.bounds[i] + args.part_rows[i];
  }
  return LaunchGeneralProduct(product, stream);
}

// dw = the balanced tree over the packs' dY^T X, see WeightGradientArgs. The packs' bounds are in
// host memory. Fast if dy, x and their leading dimensions are multiples of 16 bytes; otherwise a
// slower kernel is used. INVALID_ARGUMENT: the packs are invalid, or `continues` is set with more
// than one pack. INTERNAL: CUDA refused a launch.
absl::Status Run(const WeightGradientArgs& args, const Stream& stream) {
  ISOBIT_RETURN_IF_ERROR(CheckPacks(args));
  if (IsEmpty(args)) return absl::OkStatus();
  if (!HasWeightGradientTiles(args)) return LaunchGeneralWeightGradient(args, stream);
  ISOBIT_ASSIGN_OR_RETURN(const Card* const card, CardOf(stream));
  const ProductSchedule schedule = ScheduleOf(*card, args);
  ISOBIT_ASSIGN_OR_RETURN(std::byte* const workspace,
                          ScratchOf(stream, WorkspaceBytesAs(*card, schedule, args)));
  return LaunchWeightGradientAs(schedule, args, workspace, stream);
}

}  // namespace isobit::cuda
