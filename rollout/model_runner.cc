// Rank threads, and the jobs they do together. See model_runner.h.
#include "rollout/model_runner.h"

#include <utility>

#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "kernels/model/numerics.h"

namespace isobit {

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Create(const ModelConfig& config,
                                                                 const ModelRunnerOptions& options,
                                                                 int64_t max_sequences,
                                                                 int64_t max_rows) {
  const int size = options.tensor_parallel_size;
  ISOBIT_RETURN_IF_ERROR(ShapeOfRank(config, 0, size).status());
  std::unique_ptr<ModelRunner> runner(new ModelRunner(config, options));
  for (int r = 0; r < size; ++r) {
    ISOBIT_ASSIGN_OR_RETURN(const RankShape shape, ShapeOfRank(config, r, size));
    runner->ranks_.push_back(std::make_unique<Rank>());
    ISOBIT_ASSIGN_OR_RETURN(runner->ranks_.back()->executor,
                            options.make_rank({.config = runner->config_,
                                               .shape = shape,
                                               .rope = runner->rope_,
                                               .mode = options.mode,
                                               .page_size = options.page_size,
                                               .num_pages = options.num_pages,
                                               .max_sequences = max_sequences,
                                               .max_rows = max_rows,
                                               .comm = runner->group_.rank(r)}));
  }
  for (size_t r = 0; r < runner->ranks_.size(); ++r) {
    runner->ranks_[r]->thread = std::thread([&runner = *runner, r] { runner.ServeRank(r); });
  }
  return runner;
}

ModelRunner::ModelRunner(const ModelConfig& config, const ModelRunnerOptions& options)
    : config_(config),
      rope_(RopeTableOf(config, options.max_positions)),
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

absl::StatusOr<PackedWeights> ModelRunner::Pack(const Checkpoint& checkpoint) const {
  PackedWeights weights;
  for (const auto& rank : ranks_) {
    ISOBIT_LOG(Info) << "packing weights of rank " << weights.size() + 1 << " of " << ranks_.size();
    ISOBIT_ASSIGN_OR_RETURN(
        PackedRank packed,
        rank->executor->Pack(checkpoint, weights.empty() ? nullptr : weights.front().get()));
    weights.push_back(std::move(packed));
  }
  return weights;
}

absl::Status ModelRunner::Launch(const ModelStep& step) {
  return OnEachRank([&step](RankExecutor& rank, size_t /*r*/) { return rank.Launch(step); });
}

absl::Status ModelRunner::Collect(ModelStep& step) {
  return OnEachRank([&step](RankExecutor& rank, size_t /*r*/) { return rank.Collect(step); });
}

absl::StatusOr<PackedWeights> ModelRunner::Serve(PackedWeights weights) {
  ISOBIT_RETURN_IF_ERROR(OnEachRank([&weights](RankExecutor& rank, size_t r) -> absl::Status {
    ISOBIT_ASSIGN_OR_RETURN(weights[r], rank.Serve(std::move(weights[r])));
    return absl::OkStatus();
  }));
  return weights;
}

absl::Status ModelRunner::OnEachRank(const Job& job) {
  std::unique_lock lock(mutex_);
  if (!failure_.ok()) return failure_;
  job_ = &job;
  ++num_jobs_;
  num_busy_ = ranks_.size();
  changed_.notify_all();
  changed_.wait(lock, [this] { return num_busy_ == 0; });
  return failure_;
}

void ModelRunner::ServeRank(size_t rank) {
  uint64_t num_done = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || num_jobs_ > num_done; });
    if (stopping_) return;
    ++num_done;
    const Job& job = *job_;
    lock.unlock();
    const absl::Status status = job(*ranks_[rank]->executor, rank);
    if (!status.ok()) group_.Abort(status);
    lock.lock();
    if (failure_.ok()) failure_ = status;
    if (--num_busy_ == 0) changed_.notify_all();
  }
}

}  // namespace isobit
