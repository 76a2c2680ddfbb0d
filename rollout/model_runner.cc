// Rank threads and the two jobs they do. See model_runner.h.
#include "rollout/model_runner.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "kernels/model/numerics.h"
#include "kernels/model/rank_shape.h"

namespace isobit {

struct ModelRunner::Rank {
  Rank(const ModelConfig& config, const RankShape& shape, const ModelRunnerOptions& options,
       const contract::RopeTable& rope, Communicator& comm)
      : ops(options.make_ops()),
        layout(config, shape, *ops),
        transformer(layout, rope, options.mode, *ops, comm) {}

  const std::unique_ptr<Ops> ops;
  const WeightLayout layout;
  std::optional<KvCache> cache;
  Transformer transformer;
  std::vector<Bf16> hidden;  // [rows of the batch, hidden_size]
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Create(
    const ModelConfig& config, const ModelRunnerOptions& options) {
  const int size = options.tensor_parallel_size;
  ISOBIT_RETURN_IF_ERROR(ShapeOfRank(config, 0, size).status());
  std::unique_ptr<ModelRunner> runner(new ModelRunner(config, options));
  for (int r = 0; r < size; ++r) {
    ISOBIT_ASSIGN_OR_RETURN(const RankShape shape, ShapeOfRank(config, r, size));
    runner->ranks_.push_back(std::make_unique<Rank>(runner->config_, shape, options, runner->rope_,
                                                    runner->group_.rank(r)));
    Rank& rank = *runner->ranks_.back();
    ISOBIT_ASSIGN_OR_RETURN(rank.cache,
                            KvCache::Create(config, shape, options.num_pages, options.page_size,
                                            /*shared_layers=*/false, *rank.ops));
  }
  for (const auto& rank : runner->ranks_) {
    rank->thread = std::thread([&runner = *runner, &rank = *rank] { runner.ServeRank(rank); });
  }
  return runner;
}

ModelRunner::ModelRunner(const ModelConfig& config, const ModelRunnerOptions& options)
    : config_(config),
      rope_(RopeTableOf(config, options.max_positions)),
      packing_ops_(options.make_ops()),
      group_(options.tensor_parallel_size) {}

ModelRunner::~ModelRunner() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (const auto& rank : ranks_) {
    if (rank->thread.joinable()) rank->thread.join();
  }
}

absl::StatusOr<std::unique_ptr<ModelWeights>> ModelRunner::Pack(
    const Checkpoint& checkpoint) const {
  auto weights = std::make_unique<ModelWeights>();
  for (const auto& rank : ranks_) {
    ISOBIT_LOG(Info) << "packing weights of rank " << weights->size() + 1 << " of "
                     << ranks_.size();
    ISOBIT_ASSIGN_OR_RETURN(
        auto packed,
        ResidentWeights::Pack(rank->layout, checkpoint, *packing_ops_,
                              weights->empty() ? nullptr : weights->front()->embedding()));
    weights->push_back(std::move(packed));
  }
  return weights;
}

absl::Status ModelRunner::Forward(const Batch& batch, const ModelWeights& weights) {
  const auto width = static_cast<size_t>(config_.hidden_size);
  const size_t vocab = static_cast<size_t>(config_.vocab_size);
  const size_t num_sequences = batch.sequences.size();
  if (logits_.size() < num_sequences * vocab) logits_.resize(num_sequences * vocab);
  return OnEachRank([&](Rank& rank) -> absl::Status {
    WeightSource& source = *weights[static_cast<size_t>(rank.layout.shape().rank)];
    const size_t elements = batch.ids.size() * width;
    if (rank.hidden.size() < elements) rank.hidden.resize(elements);
    Bf16* hidden = rank.hidden.data();
    ISOBIT_RETURN_IF_ERROR(rank.transformer.Forward(batch, source, *rank.cache, hidden));
    // Only last rows become logits: they move together, each to its place or further up.
    for (size_t i = 0; i < num_sequences; ++i) {
      const SequenceRows& rows = batch.sequences[i];
      const auto last = static_cast<size_t>(rows.first_row + rows.num_rows - 1);
      std::memmove(hidden + i * width, hidden + last * width, width * sizeof(Bf16));
    }
    return rank.transformer.Logits(hidden, static_cast<int64_t>(num_sequences), source,
                                   logits_.data(), config_.vocab_size);
  });
}

absl::Status ModelRunner::Sample(absl::Span<LogProbRow> rows) {
  const size_t vocab = static_cast<size_t>(config_.vocab_size);
  for (size_t i = 0; i < rows.size(); ++i) rows[i].logits = logits_.data() + i * vocab;
  return OnEachRank([&](Rank& rank) {
    const RankShape& shape = rank.layout.shape();
    const size_t begin = rows.size() * static_cast<size_t>(shape.rank) / ranks_.size();
    const size_t end = rows.size() * static_cast<size_t>(shape.rank + 1) / ranks_.size();
    return rank.ops->LogProbs({.rows = rows.data() + begin,
                               .num_rows = static_cast<int64_t>(end - begin),
                               .vocab = config_.vocab_size});
  });
}

absl::Status ModelRunner::OnEachRank(const std::function<absl::Status(Rank&)>& job) {
  std::unique_lock lock(mutex_);
  if (!failure_.ok()) return failure_;
  job_ = &job;
  ++num_jobs_;
  num_busy_ = ranks_.size();
  changed_.notify_all();
  changed_.wait(lock, [this] { return num_busy_ == 0; });
  return failure_;
}

void ModelRunner::ServeRank(Rank& rank) {
  uint64_t num_done = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || num_jobs_ > num_done; });
    if (stopping_) return;
    ++num_done;
    const auto& job = *job_;
    lock.unlock();
    const absl::Status status = job(rank);
    if (!status.ok()) group_.Abort(status);
    lock.lock();
    if (failure_.ok()) failure_ = status;
    if (--num_busy_ == 0) changed_.notify_all();
  }
}

}  // namespace isobit
