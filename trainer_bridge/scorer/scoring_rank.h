// One shard rank of the scorer: runs the forward pass over its part of a batch with tensor-parallel
// size 1 and turns logits into scores.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SCORING_RANK_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SCORING_RANK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/parallel/communicator.h"
#include "kernels/contract/rope.h"
#include "kernels/model/sampling.h"
#include "kernels/model/transformer.h"
#include "kernels/model/weights.h"
#include "kernels/ops.h"
#include "trainer_bridge/scorer/score_job.h"
#include "trainer_bridge/scorer/sharded_weights.h"

namespace isobit::scorer {

// One sequence of a job.
struct ScoreItem {
  std::shared_ptr<ScoreJob> job;
  size_t index = 0;  // in job->inputs()

  const ScoreInput& input() const { return job->inputs()[index]; }
};

// Not thread safe: one pass at a time.
class ScoringRank {
 public:
  // `layout`, `rope` and `gathers`, this rank's end of the group that shares the weights, outlive
  // the object.
  ScoringRank(const WeightLayout& layout, const contract::RopeTable& rope, NumericsMode mode,
              std::unique_ptr<Ops> ops, Communicator& gathers);

  // One full pass over `items`, which may be none: the rank then only takes part in the gathers, as
  // all ranks must. Delivers each sequence as it is done. Items whose job has ended are not worked
  // on. An error is the device's or the group's; what is wrong with one sequence ends its job only.
  absl::Status Score(const RankShards& shards, const WeightVersion& version,
                     absl::Span<const ScoreItem> items);

  const FullBlocks& full_blocks() const { return full_; }
  const Ops& ops() const { return *ops_; }

 private:
  struct Sequence;
  struct Row;

  // At most kChunkRows rows, in order within each sequence.
  absl::Status ScoreRows(absl::Span<const Row> rows, WeightSource& weights);
  // What LogProbs is to do with a row, but for its pointers; `counts` keeps what the row points to.
  static LogProbRow Prepare(const Row& row, std::vector<TokenCount>& counts);
  static void Take(const Row& row, const LogProbRow& work);

  const WeightLayout& layout_;
  const std::unique_ptr<Ops> ops_;
  Communicator& gathers_;
  Transformer transformer_;
  FullBlocks full_;

  // They grow and never shrink.
  std::vector<Bf16> hidden_;        // of the pass
  std::vector<Bf16> chunk_hidden_;  // of the rows being scored
  std::vector<float> logits_;
};

}  // namespace isobit::scorer

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SCORING_RANK_H_
