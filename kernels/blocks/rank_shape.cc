// Cuts a model's parameters into one rank's whole leaves. See rank_shape.h.
#include "kernels/blocks/rank_shape.h"

#include "absl/strings/str_cat.h"
#include "common/base/rank_count.h"
#include "common/base/status_macros.h"
#include "kernels/contract/leaf_plan.h"

namespace isobit {
namespace {

using contract::LeafPlan;
using contract::LeafRange;
using contract::LeafSum;

// The leaves of `size` rows or columns; units: as Parameter's.
LeafPlan PlanOf(int64_t size, int64_t units) {
  return units == 0 ? contract::PlanColumns(size) : contract::PlanKvHeads(units, size / units);
}

Interval ShareOf(const LeafPlan& plan, const RankShape& rank) {
  const LeafRange leaves = contract::LeavesOfRank(rank.rank, rank.size);
  return {plan.bounds[static_cast<size_t>(leaves.begin)],
          plan.bounds[static_cast<size_t>(leaves.end)]};
}

LinearShape ColumnParallel(int64_t n, int64_t k) {
  LinearShape shape{
      .n = n, .k = k, .num_leaves = contract::kLeaves, .bounds = {}, .sum = LeafSum::kChain};
  const LeafPlan plan = contract::PlanColumns(k);
  for (size_t l = 0; l < plan.bounds.size(); ++l) shape.bounds[l] = plan.bounds[l];
  return shape;
}

// The rank's leaves of a row-parallel layer, with bounds counted from its first column.
LinearShape RowParallel(int64_t n, const LeafPlan& plan, const RankShape& rank) {
  const LeafRange leaves = contract::LeavesOfRank(rank.rank, rank.size);
  LinearShape shape{
      .n = n, .k = 0, .num_leaves = leaves.end - leaves.begin, .bounds = {}, .sum = LeafSum::kTree};
  const int64_t first = plan.bounds[static_cast<size_t>(leaves.begin)];
  for (int l = 0; l <= shape.num_leaves; ++l) {
    const int leaf = leaves.begin + l;
    shape.bounds[l] = plan.bounds[static_cast<size_t>(leaf)] - first;
  }
  shape.k = shape.bounds[shape.num_leaves];
  return shape;
}

}  // namespace

absl::StatusOr<RankShape> ShapeOfRank(const ModelConfig& config, int rank, int size) {
  static_assert(kMaxRanks == contract::kLeaves);  // a rank has at least one leaf
  ISOBIT_RETURN_IF_ERROR(CheckRankCount("tensor-parallel size", size));
  if (rank < 0 || rank >= size) {
    return absl::InvalidArgumentError(absl::StrCat("rank: expected [0, ", size, "), got ", rank));
  }
  RankShape shape;
  shape.rank = rank;
  shape.size = size;
  shape.kv_heads = ShareOf(PlanOf(config.num_kv_heads, config.num_kv_heads), shape);
  shape.vocab = ShareOf(PlanOf(config.vocab_size, 0), shape);
  shape.heads = shape.kv_heads.size() * (config.num_heads / config.num_kv_heads);
  return shape;
}

Slice SliceOf(const Parameter& parameter, const TensorSpec& tensor, const RankShape& rank) {
  Slice slice = {.rows = {0, tensor.shape[0]},
                 .columns = {0, tensor.shape.size() > 1 ? tensor.shape[1] : 1}};
  switch (parameter.cut) {
    case Cut::kReplicated:
      break;
    case Cut::kColumnParallel:
      slice.rows = ShareOf(PlanOf(slice.rows.size(), parameter.units), rank);
      break;
    case Cut::kRowParallel:
      slice.columns = ShareOf(PlanOf(slice.columns.size(), parameter.units), rank);
      break;
  }
  return slice;
}

LinearShape LinearOf(const Parameter& parameter, const RankShape& rank) {
  int64_t n = 0;
  for (const TensorSpec& tensor : parameter.tensors) {
    n += SliceOf(parameter, tensor, rank).rows.size();
  }
  const int64_t k = parameter.tensors.front().shape[1];
  LinearShape shape = parameter.cut == Cut::kRowParallel
                          ? RowParallel(n, PlanOf(k, parameter.units), rank)
                          : ColumnParallel(n, k);
  shape.gated = parameter.gated;
  return shape;
}

}  // namespace isobit
