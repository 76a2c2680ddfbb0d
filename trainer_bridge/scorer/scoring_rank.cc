// The forward pass of one rank, then logits and logprobs in chunks of rows. See scoring_rank.h.
#include "trainer_bridge/scorer/scoring_rank.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace isobit::scorer {
namespace {

// Tokens of a KV page. Whole sequences are computed and nothing is kept, so any size will do.
constexpr int64_t kPageSize = 64;

// Rows of logits that exist at one time: a long batch times a large vocabulary would not fit.
constexpr size_t kChunkRows = 64;

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

// All sequences end to end, with the pages of each.
struct Packed {
  Batch batch;
  std::vector<int32_t> pages;
};

Packed Pack(absl::Span<const ScoreItem> items) {
  Packed packed;
  std::vector<size_t> first_page;
  for (const ScoreItem& item : items) {
    const ScoreInput& input = item.input();
    std::vector<int32_t>& ids = packed.batch.ids;
    packed.batch.sequences.push_back(
        {.first_row = static_cast<int64_t>(ids.size()), .num_rows = input.num_tokens()});
    ids.insert(ids.end(), input.prompt.begin(), input.prompt.end());
    ids.insert(ids.end(), input.completion.begin(), input.completion.end());
    first_page.push_back(packed.pages.size());
    packed.pages.resize(packed.pages.size() +
                        static_cast<size_t>((input.num_tokens() + kPageSize - 1) / kPageSize));
  }
  std::iota(packed.pages.begin(), packed.pages.end(), 0);
  for (size_t s = 0; s < items.size(); ++s) {
    packed.batch.sequences[s].pages = packed.pages.data() + first_page[s];
  }
  return packed;
}

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

ScoringRank::ScoringRank(const WeightLayout& layout, const contract::RopeTable& rope,
                         NumericsMode mode, std::unique_ptr<Ops> ops, Communicator& gathers)
    : layout_(layout),
      ops_(std::move(ops)),
      gathers_(gathers),
      transformer_(layout, rope, mode, *ops_, /*all_reduce=*/nullptr),
      full_(layout, gathers.size()) {}

absl::Status ScoringRank::Score(const RankShards& shards, const WeightVersion& version,
                                absl::Span<const ScoreItem> items) {
  GatheredPass gathered(shards, gathers_, full_);
  if (items.empty()) return absl::OkStatus();
  AbandonableWeights weights(gathered, items);
  const ModelConfig& config = layout_.config();

  const Packed packed = Pack(items);
  ISOBIT_ASSIGN_OR_RETURN(
      const KvCache cache,
      KvCache::Create(config, layout_.shape(), static_cast<int32_t>(packed.pages.size()),
                      static_cast<int32_t>(kPageSize), /*shared_layers=*/true, *ops_));
  hidden_.resize(
      std::max(hidden_.size(), packed.batch.ids.size() * static_cast<size_t>(config.hidden_size)));
  const absl::Status forward = transformer_.Forward(packed.batch, weights, cache, hidden_.data());
  if (absl::IsCancelled(forward)) return absl::OkStatus();
  ISOBIT_RETURN_IF_ERROR(forward);

  std::vector<Sequence> sequences;
  std::vector<Row> rows;
  sequences.reserve(items.size());  // the rows point to them
  for (size_t s = 0; s < items.size(); ++s) {
    const ScoreInput& input = items[s].input();
    const ScoreOptions& options = items[s].job->options();
    const int64_t first = options.prompt_logprobs ? 1 : static_cast<int64_t>(input.prompt.size());
    sequences.push_back(
        {.item = &items[s],
         .sampling = SequenceSampling(options.sampling, config.eos_token_ids, 0, 0, input.prompt),
         .rows_left = static_cast<size_t>(input.num_tokens() - first),
         .score = {.index = items[s].index, .completion = {}, .prompt = {}, .version = version}});
    for (int64_t position = first; position < input.num_tokens(); ++position) {
      rows.push_back({&sequences[s], packed.batch.sequences[s].first_row + position - 1, position});
    }
    if (sequences[s].rows_left == 0) items[s].job->Deliver(std::move(sequences[s].score));
  }

  std::vector<Row> chunk;
  for (size_t next = 0; next < rows.size();) {
    chunk.clear();
    for (; next < rows.size() && chunk.size() < kChunkRows; ++next) {
      if (!rows[next].sequence->item->job->ended()) chunk.push_back(rows[next]);
    }
    if (!chunk.empty()) ISOBIT_RETURN_IF_ERROR(ScoreRows(chunk, gathered));
  }
  return absl::OkStatus();
}

absl::Status ScoringRank::ScoreRows(absl::Span<const Row> rows, WeightSource& weights) {
  const auto vocab = static_cast<size_t>(layout_.config().vocab_size);
  const auto width = static_cast<size_t>(layout_.config().hidden_size);
  chunk_hidden_.resize(kChunkRows * width);
  logits_.resize(kChunkRows * vocab);
  for (size_t r = 0; r < rows.size(); ++r) {
    std::copy_n(hidden_.data() + static_cast<size_t>(rows[r].hidden_row) * width, width,
                chunk_hidden_.data() + r * width);
  }
  ISOBIT_RETURN_IF_ERROR(transformer_.Logits(chunk_hidden_.data(),
                                             static_cast<int64_t>(rows.size()), weights,
                                             logits_.data(), static_cast<int64_t>(vocab)));

  std::vector<LogProbRow> work(rows.size());
  std::vector<std::vector<TokenCount>> counts(rows.size());
  std::vector<std::vector<TokenLogProb>> top(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    work[r] = Prepare(rows[r], counts[r]);
    top[r].resize(static_cast<size_t>(work[r].top_logprobs));
    work[r].top = top[r].data();
    work[r].logits = logits_.data() + r * vocab;
  }
  ISOBIT_RETURN_IF_ERROR(ops_->LogProbs({.rows = work.data(),
                                         .num_rows = static_cast<int64_t>(work.size()),
                                         .vocab = static_cast<int64_t>(vocab)}));
  for (size_t r = 0; r < rows.size(); ++r) Take(rows[r], work[r]);
  return absl::OkStatus();
}

LogProbRow ScoringRank::Prepare(const Row& row, std::vector<TokenCount>& counts) {
  Sequence& sequence = *row.sequence;
  const ScoreInput& input = sequence.item->input();
  const ScoreOptions& options = sequence.item->job->options();
  const auto position = static_cast<size_t>(row.position);
  LogProbRow work;
  work.top_logprobs = static_cast<int32_t>(options.sampling.logprobs);
  if (row.in_prompt()) {
    work.target = input.prompt[position];
    work.raw = true;
    return work;
  }
  work.target = input.completion[position - input.prompt.size()];
  work.raw = options.raw;
  work.want_entropy = options.entropy;
  if (!options.raw) {
    work.sampling = sequence.sampling.NextRow();
    // The counts change with the sequence's next row; the other spans do not.
    counts.assign(work.sampling.counts.begin(), work.sampling.counts.end());
    work.sampling.counts = counts;
    sequence.sampling.Append(work.target);
  }
  return work;
}

void ScoringRank::Take(const Row& row, const LogProbRow& work) {
  Sequence& sequence = *row.sequence;
  ScoreJob& job = *sequence.item->job;
  if (!work.finite) {
    job.End(absl::InternalError(absl::StrCat("sequences[", sequence.item->index,
                                             "]: the logits that score position ", row.position,
                                             " are not finite")));
    return;
  }
  TokenScores& scores = row.in_prompt() ? sequence.score.prompt : sequence.score.completion;
  scores.logprobs.push_back(work.token.logprob);
  if (work.want_entropy) scores.entropies.push_back(work.entropy);
  scores.top.insert(scores.top.end(), work.top, work.top + work.top_logprobs);
  if (--sequence.rows_left == 0) job.Deliver(std::move(sequence.score));
}

}  // namespace isobit::scorer
