// Rank threads, and the jobs they do together. See model_runner.h.
#include "rollout/model_runner.h"

#include <algorithm>
#include <utility>

#include "common/base/status_macros.h"
#include "common/parallel/spin_wait.h"
#include "kernels/model/numerics.h"

namespace isobit {
namespace {

constexpr std::chrono::microseconds kAwake(50);

}  // namespace

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
                                               .max_sequences = max_sequences,
                                               .max_rows = max_rows,
                                               .comm = runner->group_.rank(r)}));
  }
  ISOBIT_RETURN_IF_ERROR(runner->AllocateKvCache(options, max_sequences));
  for (size_t r = 0; r < runner->ranks_.size(); ++r) {
    runner->ranks_[r]->thread = std::thread([&runner = *runner, r] { runner.ServeRank(r); });
  }
  return runner;
}

ModelRunner::ModelRunner(const ModelConfig& config, const ModelRunnerOptions& options)
    : config_(config),
      rope_(RopeTableOf(config, options.max_positions)),
      group_(options.tensor_parallel_size),
      awake_(std::thread::hardware_concurrency() >
                     static_cast<unsigned>(options.tensor_parallel_size)
                 ? kAwake
                 : std::chrono::microseconds(0)) {}

ModelRunner::~ModelRunner() {
  Publish(nullptr);
  for (const auto& rank : ranks_) {
    if (rank->thread.joinable()) rank->thread.join();
  }
}

absl::Status ModelRunner::AllocateKvCache(const ModelRunnerOptions& options,
                                          int64_t max_sequences) {
  num_pages_ = options.num_pages;
  if (num_pages_ == 0) {
    // More can never be in use.
    int64_t pages = (options.max_positions / options.page_size + 1) * max_sequences;
    for (const auto& rank : ranks_) {
      ISOBIT_ASSIGN_OR_RETURN(const int32_t fit, rank->executor->KvPagesThatFit());
      pages = std::min<int64_t>(pages, fit);
    }
    num_pages_ = static_cast<int32_t>(pages);
  }
  for (const auto& rank : ranks_) {
    ISOBIT_RETURN_IF_ERROR(rank->executor->AllocateKvCache(num_pages_));
  }
  return absl::OkStatus();
}

RankMemory ModelRunner::memory() const {
  RankMemory most;
  for (const auto& rank : ranks_) {
    const RankMemory memory = rank->executor->memory();
    if (memory.total() > most.total()) most = memory;
  }
  return most;
}

ResidentStore ModelRunner::NewStore() const {
  std::vector<ResidentWeights*> weights;
  for (const auto& rank : ranks_) weights.push_back(rank->executor->weights());
  return ResidentStore(std::move(weights));
}

absl::Status ModelRunner::Launch(const ModelStep& step) {
  return OnEachRank([&step](RankExecutor& rank, size_t /*r*/) { return rank.Launch(step); });
}

absl::Status ModelRunner::Collect(ModelStep& step) {
  return OnEachRank([&step](RankExecutor& rank, size_t /*r*/) { return rank.Collect(step); });
}

absl::Status ModelRunner::Serve(const std::vector<PreparedBlocks>& prepared) {
  return OnEachRank([&prepared](RankExecutor& rank, size_t r) { return rank.Serve(prepared[r]); });
}

absl::Status ModelRunner::OnEachRank(const Job& job) {
  if (!failure_.ok()) return failure_;
  auto num_busy = static_cast<uint32_t>(ranks_.size());
  num_busy_.store(num_busy, std::memory_order_relaxed);
  Publish(&job);
  while (num_busy > 0) num_busy = AwaitChange(num_busy_, num_busy, awake_);
  return failure_;
}

void ModelRunner::Publish(const Job* job) {
  job_ = job;
  num_jobs_.fetch_add(1, std::memory_order_release);
  num_jobs_.notify_all();
}

void ModelRunner::ServeRank(size_t rank) {
  uint32_t num_jobs = 0;
  while (true) {
    num_jobs = AwaitChange(num_jobs_, num_jobs, awake_);
    if (job_ == nullptr) return;
    const absl::Status status = (*job_)(*ranks_[rank]->executor, rank);
    if (!status.ok()) {
      {
        const std::lock_guard lock(failure_mutex_);
        if (failure_.ok()) failure_ = status;
      }
      group_.Abort(status);
    }
    if (num_busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) num_busy_.notify_one();
  }
}

}  // namespace isobit
