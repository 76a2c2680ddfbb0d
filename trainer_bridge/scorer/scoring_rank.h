// One shard rank of the scorer: runs the forward pass over its share of a batch, with
// tensor-parallel size 1, and computes scores from logits.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SCORING_RANK_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SCORING_RANK_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/parallel/block_gather.h"
#include "kernels/backend.h"
#include "kernels/contract/portable.h"
#include "kernels/contract/rope.h"
#include "kernels/growing_buffer.h"
#include "kernels/model/sampling.h"
#include "kernels/model/transformer.h"
#include "kernels/model/weights.h"
#include "kernels/ops/log_probs.h"
#include "trainer_bridge/scorer/packed_pass.h"
#include "trainer_bridge/scorer/score_job.h"
#include "trainer_bridge/scorer/sharded_weights.h"

namespace isobit {

// Not thread-safe: one pass at a time.
class ScoringRank {
 public:
  // `layout` and `rope` outlive the object. gather: this rank's end of the group that shares the
  // weights; null if it is the only rank. chunk_rows: how many rows of logits exist at the same
  // time, since a long batch times a large vocabulary would not fit. prefix_sharing: whether tokens
  // with which several sequences of a pass begin are computed only once.
  ScoringRank(const WeightLayout& layout, const contract::RopeTable& rope,
              std::unique_ptr<Backend> ops, std::unique_ptr<BlockGather> gather, size_t chunk_rows,
              bool prefix_sharing);

  // Allocates memory for passes of up to `tokens` tokens, 8 and more per sequence on average. With
  // shorter sequences or more tokens, a pass allocates the rest, or ends its jobs with
  // RESOURCE_EXHAUSTED. RESOURCE_EXHAUSTED is also this method's error.
  absl::Status Reserve(int64_t tokens);

  // One full pass over `items`. Without items the rank only takes part in the gathers, as every
  // rank must. Delivers each sequence once it is done, and skips items whose job has ended. Errors
  // are the device's or the group's; what is wrong with one sequence ends only its job.
  absl::Status Score(const RankShards& shards, const WeightVersion& version,
                     absl::Span<const ScoreItem> items);

  // A pass over `tokens` that `probe` observes. Meanwhile the other ranks call Score without items.
  // Errors are the device's or the group's. PrepareProbe allocates its memory. RESOURCE_EXHAUSTED:
  // there is none.
  absl::Status PrepareProbe(int64_t tokens);
  absl::Status Probe(const RankShards& shards, absl::Span<const int32_t> tokens,
                     ForwardProbe& probe);
  void DropProbe() { transformer_.DropProbe(); }

  // Makes the running pass and all later ones fail with `reason`, an error, as soon as they wait
  // for another rank. Any thread may call it.
  void Abort(const absl::Status& reason) { full_.Abort(reason); }

  const FullBlocks& full_blocks() const { return full_; }
  const Backend& ops() const { return *ops_; }

 private:
  struct Sequence;
  struct Row;
  struct Scored;

  // Allocates everything that a pass needs before it starts: allocating and freeing memory may wait
  // for the device, and during a pass the device may wait for another rank.
  absl::Status Prepare(int64_t rows, int64_t num_pages, int32_t num_slots = 0);
  absl::Status ScoreItems(const PackedPass& packed, const WeightVersion& version,
                          absl::Span<const ScoreItem> items, GatheredPass& pass);
  // Launches the logits of at most chunk_rows_ rows, in order within each sequence.
  absl::Status LaunchLogits(absl::Span<const Row> rows, WeightSource& weights);
  // Scores the rows of the last LaunchLogits, and waits for the result.
  absl::Status ScoreRows(absl::Span<const Row> rows, Scored& scored);
  // The LogProbs request of a row; `counts` keeps the memory to which it points.
  static LogProbRequest RequestOf(const Row& row, std::vector<TokenCount>& counts);
  static void Take(const Row& row, const LogProbRequest& request, const LogProbResult& result);

  const WeightLayout& layout_;
  const std::unique_ptr<Backend> ops_;
  const size_t chunk_rows_;
  const bool prefix_sharing_;
  const bool has_slots_;
  Transformer transformer_;
  FullBlocks full_;

  std::optional<KvCache> cache_;
  GrowingBuffer<Bf16> hidden_;        // [rows of the pass, hidden_size]
  GrowingBuffer<Bf16> chunk_hidden_;  // [chunk_rows, hidden_size]
  GrowingBuffer<float> logits_;       // [chunk_rows, vocab_size]
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SCORING_RANK_H_
