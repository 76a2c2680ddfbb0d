// The forward pass of one rank, then logits and logprobs in chunks of rows. See scoring_rank.h.
#include "trainer_bridge/scorer/scoring_rank.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/model/probed_pass.h"
#include "trainer_bridge/scorer/page_numbers.h"

namespace isobit {
namespace {

// Stops a forward pass between two blocks once nobody wants its results any more.
class AbandonableWeights final : public WeightSource {
 public:
  AbandonableWeights(WeightSource& weights, absl::Span<const ScoreItem> items)
      : weights_(weights), items_(items) {}

  absl::StatusOr<const std::byte*> Acquire(int block) override {
    if (std::all_of(items_.begin(), items_.end(),
                    [](const ScoreItem& item) { return item.job->ended(); })) {
      return absl::CancelledError("every sequence of the pass was given up");
    }
    return weights_.Acquire(block);
  }
  void Release(int block) override { weights_.Release(block); }

 private:
  WeightSource& weights_;
  const absl::Span<const ScoreItem> items_;
};

}  // namespace

// What is known of one sequence of the pass.
struct ScoringRank::Sequence {
  const ScoreItem* item;
  SequenceSampling sampling;
  size_t rows_left;
  SequenceScore score;
};

// One row of logits to be scored.
struct ScoringRank::Row {
  Sequence* sequence;
  int64_t hidden_row;  // of the pass
  int64_t position;    // in the sequence, of the token that the row scores

  bool in_prompt() const {
    return position < static_cast<int64_t>(sequence->item->input().prompt.size());
  }
};

// What LogProbs is asked of the rows of a chunk, what the requests point to, and what it says.
struct ScoringRank::Scored {
  std::vector<LogProbRequest> requests;
  std::vector<std::vector<TokenCount>> counts;
  std::vector<LogProbResult> results;
};

ScoringRank::ScoringRank(const WeightLayout& layout, const contract::RopeTable& rope,
                         std::unique_ptr<Backend> ops, std::unique_ptr<BlockGather> gather,
                         size_t chunk_rows, bool prefix_sharing)
    : layout_(layout),
      ops_(std::move(ops)),
      chunk_rows_(chunk_rows),
      prefix_sharing_(prefix_sharing),
      has_slots_(SlotsOf(layout.plan(), layout.shape()).bytes > 0),
      transformer_(layout, rope, *ops_, nullptr),
      full_(std::move(gather)) {}

absl::Status ScoringRank::Reserve(int64_t tokens) {
  constexpr int64_t kShort = 8;
  return Prepare(tokens, tokens / kScorePageSize + tokens / kShort + 1);
}

absl::Status ScoringRank::Score(const RankShards& shards, const WeightVersion& version,
                                absl::Span<const ScoreItem> items) {
  const PackedPass packed(items, prefix_sharing_, has_slots_);
  const absl::Status prepared =
      items.empty() ? absl::OkStatus()
                    : Prepare(packed.num_rows(), packed.num_pages(), packed.num_slots());
  GatheredPass pass(shards, full_);
  if (absl::IsResourceExhausted(prepared)) {
    for (const ScoreItem& item : items) {
      item.job->End(absl::ResourceExhaustedError(absl::StrCat(
          item.job->NameOf(item.index), ": no memory for a pass of ", packed.num_rows(),
          " tokens beside what the scorer took for max_batch_tokens at its start: ",
          prepared.message())));
    }
  } else if (!items.empty()) {
    ISOBIT_RETURN_IF_ERROR(prepared);
    const absl::Status scored = ScoreItems(packed, version, items, pass);
    if (!scored.ok() && !absl::IsCancelled(scored)) return scored;
  }
  ISOBIT_RETURN_IF_ERROR(pass.Finish());
  return ops_->device().Synchronize();  // a pass that was given up may still read `packed`
}

absl::Status ScoringRank::PrepareProbe(int64_t tokens) {
  ISOBIT_RETURN_IF_ERROR(Prepare(tokens, (tokens + kScorePageSize - 1) / kScorePageSize));
  return transformer_.PrepareProbe(tokens);
}

absl::Status ScoringRank::Probe(const RankShards& shards, absl::Span<const int32_t> tokens,
                                ForwardProbe& probe) {
  const ProbePass sequence(tokens, static_cast<int32_t>(kScorePageSize));
  GatheredPass pass(shards, full_);
  if (!ops_->device().is_host()) {
    probe.ReadFrom(ops_->device(), [&pass] { return pass.WaitForStarted(); });
  }
  ISOBIT_RETURN_IF_ERROR(RunProbedPass(transformer_, sequence, pass,
                                       {layout_, *cache_, hidden_.data(), logits_.data()}, probe));
  return pass.Finish();
}

absl::Status ScoringRank::Prepare(int64_t rows, int64_t num_pages, int32_t num_slots) {
  const ModelConfig& config = layout_.config();
  CacheSize size = {.num_pages = static_cast<int32_t>(num_pages),
                    .page_size = static_cast<int32_t>(kScorePageSize),
                    .num_slots = num_slots,
                    .shared = true};
  if (cache_) {
    size.num_pages = std::max(size.num_pages, cache_->size().num_pages);
    size.num_slots = std::max(size.num_slots, cache_->size().num_slots);
  }
  if (!cache_ || cache_->size() != size) {
    cache_.reset();
    ISOBIT_ASSIGN_OR_RETURN(cache_,
                            KvCache::Create(layout_.plan(), layout_.shape(), size, ops_->device()));
  }
  ISOBIT_RETURN_IF_ERROR(transformer_.Reserve(rows));
  const auto chunk_rows = static_cast<int64_t>(chunk_rows_);
  ISOBIT_RETURN_IF_ERROR(hidden_.Reserve(ops_->device(), rows * config.hidden_size));
  ISOBIT_RETURN_IF_ERROR(chunk_hidden_.Reserve(ops_->device(), chunk_rows * config.hidden_size));
  return logits_.Reserve(ops_->device(), chunk_rows * config.vocab_size);
}

absl::Status ScoringRank::ScoreItems(const PackedPass& packed, const WeightVersion& version,
                                     absl::Span<const ScoreItem> items, GatheredPass& pass) {
  const ModelConfig& config = layout_.config();
  AbandonableWeights weights(pass, items);
  ISOBIT_RETURN_IF_ERROR(transformer_.Forward(packed.batch(), weights, *cache_, hidden_.data()));

  std::vector<Sequence> sequences;
  std::vector<Row> rows;
  sequences.reserve(items.size());  // the rows point to them
  for (size_t s = 0; s < items.size(); ++s) {
    const ScoreInput& input = items[s].input();
    const ScoreOptions& options = items[s].job->options();
    const int64_t first = items[s].first_scored();
    sequences.push_back(
        {.item = &items[s],
         .sampling = SequenceSampling(options.sampling, config.eos_token_ids, 0, 0, input.prompt),
         .rows_left = static_cast<size_t>(input.num_tokens() - first),
         .score = {.index = items[s].index, .completion = {}, .prompt = {}, .version = version}});
    for (int64_t position = first; position < input.num_tokens(); ++position) {
      rows.push_back({&sequences[s], packed.RowOf(s, position - 1), position});
    }
    if (sequences[s].rows_left == 0) items[s].job->Deliver(std::move(sequences[s].score));
  }

  // From here on the host waits for the ops, so none may wait for a rank that has gone.
  ISOBIT_RETURN_IF_ERROR(pass.WaitForArrival());
  size_t next = 0;
  const auto next_chunk = [&] {
    std::vector<Row> chunk;
    for (; next < rows.size() && chunk.size() < chunk_rows_; ++next) {
      if (!rows[next].sequence->item->job->ended()) chunk.push_back(rows[next]);
    }
    return chunk;
  };
  std::vector<Row> chunk = next_chunk();
  if (!chunk.empty()) ISOBIT_RETURN_IF_ERROR(LaunchLogits(chunk, pass));
  while (!chunk.empty()) {
    Scored scored;
    ISOBIT_RETURN_IF_ERROR(ScoreRows(chunk, scored));
    const std::vector<Row> done = std::exchange(chunk, next_chunk());
    // The next logits are computed while the present results are handed out.
    if (!chunk.empty()) ISOBIT_RETURN_IF_ERROR(LaunchLogits(chunk, pass));
    for (size_t r = 0; r < done.size(); ++r) {
      Take(done[r], scored.requests[r], scored.results[r]);
    };
  }
  return absl::OkStatus();
}

absl::Status ScoringRank::LaunchLogits(absl::Span<const Row> rows, WeightSource& weights) {
  const auto width = static_cast<size_t>(layout_.config().hidden_size);
  const auto* const hidden = hidden_.data();
  const auto first = static_cast<size_t>(rows.front().hidden_row);
  const Bf16* x = hidden + first * width;
  // A sequence's rows follow each other, except where it begins like another: usually a few runs
  // make a chunk.
  const auto run_end = [&rows](size_t begin) {
    size_t end = begin + 1;
    while (end < rows.size() && rows[end].hidden_row == rows[end - 1].hidden_row + 1) ++end;
    return end;
  };
  if (run_end(0) < rows.size()) {
    auto* const gathered = chunk_hidden_.data();
    for (size_t begin = 0; begin < rows.size();) {
      const size_t end = run_end(begin);
      ISOBIT_RETURN_IF_ERROR(ops_->device().Copy(
          gathered + begin * width, hidden + static_cast<size_t>(rows[begin].hidden_row) * width,
          (end - begin) * width * sizeof(Bf16)));
      begin = end;
    }
    x = gathered;
  }
  return transformer_.Logits(x, static_cast<int64_t>(rows.size()), weights, logits_.data(),
                             layout_.config().vocab_size);
}

absl::Status ScoringRank::ScoreRows(absl::Span<const Row> rows, Scored& scored) {
  const int64_t vocab = layout_.config().vocab_size;
  const auto* const logits = logits_.data();
  scored.counts.resize(rows.size());
  scored.results.resize(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    scored.requests.push_back(RequestOf(rows[r], scored.counts[r]));
  }
  return ops_->Run(LogProbsArgs{.logits = logits,
                                .ld = vocab,
                                .requests = scored.requests.data(),
                                .results = scored.results.data(),
                                .num_rows = static_cast<int64_t>(rows.size()),
                                .vocab = vocab});
}

LogProbRequest ScoringRank::RequestOf(const Row& row, std::vector<TokenCount>& counts) {
  Sequence& sequence = *row.sequence;
  const ScoreInput& input = sequence.item->input();
  const ScoreOptions& options = sequence.item->job->options();
  const auto position = static_cast<size_t>(row.position);
  LogProbRequest request;
  request.top_logprobs = static_cast<int32_t>(options.sampling.logprobs);
  if (row.in_prompt()) {
    request.target = input.prompt[position];
    request.raw = true;
    return request;
  }
  request.target = input.completion[position - input.prompt.size()];
  request.raw = options.raw;
  request.want_entropy = options.entropy;
  if (!options.raw) {
    request.sampling = sequence.sampling.NextRow();
    // The counts change with the sequence's next row; the other spans do not.
    counts.assign(request.sampling.counts.begin(), request.sampling.counts.end());
    request.sampling.counts = counts;
    sequence.sampling.Append(request.target);
  }
  return request;
}

void ScoringRank::Take(const Row& row, const LogProbRequest& request, const LogProbResult& result) {
  Sequence& sequence = *row.sequence;
  ScoreJob& job = *sequence.item->job;
  if (!result.finite) {
    job.End(absl::InternalError(absl::StrCat(job.NameOf(sequence.item->index),
                                             ": the logits that score position ", row.position,
                                             " are not finite")));
    return;
  }
  TokenScores& scores = row.in_prompt() ? sequence.score.prompt : sequence.score.completion;
  scores.logprobs.push_back(result.token.logprob);
  if (request.want_entropy) scores.entropies.push_back(result.entropy);
  scores.top.insert(scores.top.end(), result.top.begin(), result.top.end());
  if (--sequence.rows_left == 0) job.Deliver(std::move(sequence.score));
}

}  // namespace isobit
