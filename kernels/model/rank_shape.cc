// Cuts a model's layers into one rank's whole leaves. See rank_shape.h.
#include "kernels/model/rank_shape.h"

#include "absl/strings/str_cat.h"
#include "kernels/contract/leaf_plan.h"

namespace isobit {
namespace {

using contract::LeafPlan;
using contract::LeafRange;
using contract::LeafSum;

LinearShape ColumnParallel(int64_t n, int64_t k) {
  LinearShape shape{
      .n = n, .k = k, .num_leaves = contract::kLeaves, .bounds = {}, .sum = LeafSum::kChain};
  const LeafPlan plan = contract::PlanColumns(k);
  for (size_t l = 0; l < plan.bounds.size(); ++l) shape.bounds[l] = plan.bounds[l];
  return shape;
}

// The rank's leaves of a row-parallel layer, with bounds counted from its first column.
LinearShape RowParallel(int64_t n, const LeafPlan& plan, LeafRange leaves) {
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

Interval Columns(const LeafPlan& plan, LeafRange leaves) {
  return {plan.bounds[static_cast<size_t>(leaves.begin)],
          plan.bounds[static_cast<size_t>(leaves.end)]};
}

}  // namespace

absl::StatusOr<RankShape> ShapeOfRank(const ModelConfig& config, int rank, int size) {
  if (size != 1 && size != 2 && size != 4 && size != 8) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor-parallel size: expected 1, 2, 4 or 8, got ", size));
  }
  if (rank < 0 || rank >= size) {
    return absl::InvalidArgumentError(absl::StrCat("rank: expected [0, ", size, "), got ", rank));
  }
  const LeafRange leaves = contract::LeavesOfRank(rank, size);
  const int64_t group_columns = int64_t{config.num_heads} / config.num_kv_heads * config.head_dim;
  const LeafPlan groups = contract::PlanGroups(config.num_kv_heads, group_columns);
  const LeafPlan intermediate = contract::PlanColumns(config.intermediate_size);

  RankShape shape;
  shape.rank = rank;
  shape.size = size;
  const Interval o_columns = Columns(groups, leaves);
  shape.kv_heads = {o_columns.begin / group_columns, o_columns.end / group_columns};
  shape.heads = o_columns.size() / config.head_dim;
  shape.intermediate = Columns(intermediate, leaves);
  shape.vocab = Columns(contract::PlanColumns(config.vocab_size), leaves);

  shape.qkv = ColumnParallel((shape.heads + 2 * shape.kv_heads.size()) * config.head_dim,
                             config.hidden_size);
  shape.o = RowParallel(config.hidden_size, groups, leaves);
  shape.gate_up = ColumnParallel(2 * shape.intermediate.size(), config.hidden_size);
  shape.gate_up.gated = true;
  shape.down = RowParallel(config.hidden_size, intermediate, leaves);
  shape.head = ColumnParallel(shape.vocab.size(), config.hidden_size);
  return shape;
}

}  // namespace isobit
