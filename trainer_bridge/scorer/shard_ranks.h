// The shard ranks of this process: their backends, their shards of every version of the weights,
// and their passes; each rank has a thread of its own. Not here: which sequences a pass scores, and
// the ranks of other processes.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SHARD_RANKS_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SHARD_RANKS_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/opened_model.h"
#include "common/parallel/thread_group.h"
#include "kernels/contract/rope.h"
#include "kernels/model/weights.h"
#include "kernels/runtime/rank_backend.h"
#include "kernels/runtime/rank_threads.h"
#include "trainer_bridge/scorer/scoring_rank.h"
#include "trainer_bridge/scorer/sharded_weights.h"

namespace isobit {

struct ShardRanksOptions {
  int num_shards = 2;  // of all processes, in [1, 64]
  int first_rank = 0;
  int num_ranks = 2;                // of this process: [first_rank, first_rank + num_ranks)
  int64_t max_context = 0;          // positions of one sequence, more than 0
  int64_t max_batch_tokens = 2048;  // of a rank's pass; their memory is allocated at the start
  size_t chunk_rows = 64;           // rows of logits on a rank at the same time
  bool prefix_sharing = true;       // compute common beginnings in a pass once

  RankBackend backend;
};

// A version of the weights, cut into shards for this process's ranks.
struct ShardedVersion {
  WeightVersion version;
  std::vector<RankShards> ranks;
};

class ShardRanks {
 public:
  // Errors: the backend's. RESOURCE_EXHAUSTED: no memory for passes of max_batch_tokens.
  static absl::StatusOr<std::unique_ptr<ShardRanks>> Create(const ModelPlan& plan,
                                                            ShardRanksOptions options);
  ShardRanks(const ShardRanks&) = delete;
  ShardRanks& operator=(const ShardRanks&) = delete;

  // Makes a version of the weights; `pack` (PackModel or PrepareWeights) fills it and returns the
  // digest. Any thread, even while a pass runs. Errors: those of `pack`, or of a device.
  absl::StatusOr<std::shared_ptr<const ShardedVersion>> Cut(
      uint64_t version, absl::FunctionRef<absl::StatusOr<std::string>(WeightStore&)> pack) const;

  // One pass on all ranks; items[i] are those of local rank i. One pass at a time. An error is the
  // one of the rank that failed first, comes from a device or the group, and is final.
  absl::Status Score(const ShardedVersion& weights, absl::Span<const std::vector<ScoreItem>> items);

  // Runs a pass over `tokens` on the first rank and returns every op's result. Otherwise as Score.
  // Call PrepareProbe before; it allocates the memory. RESOURCE_EXHAUSTED: there is none.
  absl::Status PrepareProbe(int64_t tokens) { return ranks_.front()->PrepareProbe(tokens); }
  absl::StatusOr<ProbeReport> Probe(const ShardedVersion& weights, absl::Span<const int32_t> tokens,
                                    const ProbeWanted& wanted);

  // Makes the running pass and all later ones fail with `reason`, an error. Any thread.
  void Abort(const absl::Status& reason);

  const ShardRanksOptions& options() const { return options_; }
  const ModelPlan& plan() const { return layout_->plan(); }
  const ModelConfig& config() const { return layout_->config(); }
  const WeightLayout& layout() const { return *layout_; }
  const char* ops_name() const { return ranks_.front()->ops().name(); }
  // Full blocks currently on one rank, and their peak: the maximum over the ranks.
  int resident_blocks() const;
  int peak_blocks() const;
  // How long the gathers of the last pass took on the slowest rank.
  std::chrono::microseconds gather_time() const;

 private:
  ShardRanks(const ModelPlan& plan, ShardRanksOptions options);
  absl::Status Init(const ModelPlan& plan);

  const ShardRanksOptions options_;
  const contract::RopeTable rope_;
  ThreadGroup host_group_;  // without RankBackend::make_gather
  std::unique_ptr<const WeightLayout> layout_;
  std::vector<std::unique_ptr<ScoringRank>> ranks_;
  RankThreads threads_;  // ends before what its jobs use
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SHARD_RANKS_H_
