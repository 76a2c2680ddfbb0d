// Makes the ranks, cuts weights, and runs passes on all threads.
#include "trainer_bridge/scorer/shard_ranks.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/parallel/host_block_gather.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/model/numerics.h"

namespace isobit {

absl::StatusOr<std::unique_ptr<ShardRanks>> ShardRanks::Create(const ModelPlan& plan,
                                                               ShardRanksOptions options) {
  std::unique_ptr<ShardRanks> ranks(new ShardRanks(plan, std::move(options)));
  ISOBIT_RETURN_IF_ERROR(ranks->Init(plan));
  return ranks;
}

ShardRanks::ShardRanks(const ModelPlan& plan, ShardRanksOptions options)
    : options_(std::move(options)),
      rope_(RopeTableOf(plan.config, options_.max_context)),
      host_group_(options_.num_ranks),
      threads_(static_cast<size_t>(options_.num_ranks),
               [this](const absl::Status& failure) { Abort(failure); }) {}

absl::Status ShardRanks::Init(const ModelPlan& plan) {
  ISOBIT_CHECK(options_.backend.make_gather || options_.num_ranks == options_.num_shards)
      << "ranks of several processes without something that gathers between them";
  ISOBIT_ASSIGN_OR_RETURN(const RankShape shape, ShapeOfRank(plan.config, 0, 1));
  std::vector<std::unique_ptr<Backend>> ops;
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    ISOBIT_ASSIGN_OR_RETURN(ops.emplace_back(), options_.backend.make_ops(rank));
  }
  layout_ = std::make_unique<const WeightLayout>(plan, shape, ops.front()->packer());
  const size_t block_bytes = GatheredBytes(*layout_, options_.num_shards);
  std::vector<std::unique_ptr<BlockGather>> gathers(ops.size());
  if (options_.num_shards > 1) {
    ISOBIT_RETURN_IF_ERROR(threads_.Run([&](size_t i) -> absl::Status {
      const int rank = static_cast<int>(i);
      if (options_.backend.make_gather) {
        ISOBIT_ASSIGN_OR_RETURN(gathers[i], options_.backend.make_gather(rank, block_bytes));
      } else {
        gathers[i] = std::make_unique<HostBlockGather>(host_group_.rank(rank), block_bytes);
      }
      return absl::OkStatus();
    }));
  }
  for (size_t i = 0; i < ops.size(); ++i) {
    ranks_.push_back(std::make_unique<ScoringRank>(*layout_, rope_, std::move(ops[i]),
                                                   std::move(gathers[i]), options_.chunk_rows,
                                                   options_.prefix_sharing));
    const absl::Status reserved = ranks_.back()->Reserve(options_.max_batch_tokens);
    if (!reserved.ok()) {
      return absl::Status(reserved.code(),
                          absl::StrCat("passes of max_batch_tokens, ", options_.max_batch_tokens,
                                       ": ", reserved.message()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const ShardedVersion>> ShardRanks::Cut(
    uint64_t version, absl::FunctionRef<absl::StatusOr<std::string>(WeightStore&)> pack) const {
  std::vector<std::unique_ptr<Device>> devices;
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    ISOBIT_ASSIGN_OR_RETURN(devices.emplace_back(), options_.backend.make_device(rank));
  }
  ShardedStore store(*layout_, options_.num_shards, options_.first_rank, devices);
  auto weights = std::make_shared<ShardedVersion>();
  weights->version.id = version;
  ISOBIT_ASSIGN_OR_RETURN(weights->version.digest, pack(store));
  weights->version.tensors = std::make_shared<const TensorDigests>(store.tensor_digests());
  weights->ranks = store.Take();
  return weights;
}

absl::Status ShardRanks::Score(const ShardedVersion& weights,
                               absl::Span<const std::vector<ScoreItem>> items) {
  return threads_.Run(
      [&](size_t i) { return ranks_[i]->Score(weights.ranks[i], weights.version, items[i]); });
}

absl::StatusOr<ProbeReport> ShardRanks::Probe(const ShardedVersion& weights,
                                              absl::Span<const int32_t> tokens,
                                              const ProbeWanted& wanted) {
  ForwardProbe probe(config(), layout_->shape(), wanted);
  const absl::Status done = threads_.Run([&](size_t i) {
    return i == 0 ? ranks_[i]->Probe(weights.ranks[i], tokens, probe)
                  : ranks_[i]->Score(weights.ranks[i], weights.version, {});
  });
  ranks_.front()->DropProbe();
  ISOBIT_RETURN_IF_ERROR(done);
  return ForwardProbe::Merge(absl::MakeConstSpan(&probe, 1));
}

void ShardRanks::Abort(const absl::Status& reason) {
  for (const auto& rank : ranks_) rank->Abort(reason);
}

int ShardRanks::resident_blocks() const {
  int most = 0;
  for (const auto& rank : ranks_) most = std::max(most, rank->full_blocks().resident());
  return most;
}

int ShardRanks::peak_blocks() const {
  int most = 0;
  for (const auto& rank : ranks_) most = std::max(most, rank->full_blocks().peak());
  return most;
}

std::chrono::microseconds ShardRanks::gather_time() const {
  std::chrono::microseconds longest(0);
  for (const auto& rank : ranks_) longest = std::max(longest, rank->full_blocks().gather_time());
  return longest;
}

}  // namespace isobit
