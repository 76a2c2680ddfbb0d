// Runs the model: one thread for each tensor-parallel rank, each with its own executor. Not here:
// what is run, and when.
#ifndef ISOBIT_ROLLOUT_MODEL_RUNNER_H_
#define ISOBIT_ROLLOUT_MODEL_RUNNER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "common/config/numerics_mode.h"
#include "common/parallel/thread_group.h"
#include "kernels/runtime/rank_executor.h"

namespace isobit {

struct ModelRunnerOptions {
  int tensor_parallel_size = 4;  // 1, 2, 4 or 8
  NumericsMode mode = NumericsMode::kTree;
  int32_t page_size = 16;     // tokens
  int32_t num_pages = 0;      // 0: as many as fit every rank's memory and can ever be in use
  int64_t max_positions = 0;  // of one sequence
  MakeRank make_rank;         // the backend
};

class ModelRunner {
 public:
  // Makes the ranks and starts their threads. max_sequences, max_rows: of one step.
  // INVALID_ARGUMENT: tensor_parallel_size. RESOURCE_EXHAUSTED: not one KV page fits. Else
  // make_rank's errors.
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(const ModelConfig& config,
                                                             const ModelRunnerOptions& options,
                                                             int64_t max_sequences,
                                                             int64_t max_rows);
  ~ModelRunner();
  ModelRunner(const ModelRunner&) = delete;
  ModelRunner& operator=(const ModelRunner&) = delete;

  std::string backend() const { return ranks_.front()->executor->backend(); }
  int32_t num_pages() const { return num_pages_; }  // of the KV cache, on every rank
  // Of the rank with the most.
  RankMemory memory() const;

  // For a new version on all ranks; to be filled from one thread, any thread, even while a step
  // runs.
  ResidentStore NewStore() const;

  // The calls below come from one thread, and do on all ranks what RankExecutor says. An error is
  // final.
  int depth() const { return ranks_.front()->executor->depth(); }
  absl::Status Launch(const ModelStep& step);
  absl::Status Collect(ModelStep& step);
  absl::Status Serve(const std::vector<PreparedBlocks>& prepared);  // [rank]

 private:
  struct Rank {
    std::unique_ptr<RankExecutor> executor;
    std::thread thread;
  };
  using Job = std::function<absl::Status(RankExecutor& executor, size_t rank)>;

  ModelRunner(const ModelConfig& config, const ModelRunnerOptions& options);
  // Runs `job` on every rank's thread and waits for all. The error is that of the first rank to
  // fail; it ends the group, so that the other ranks do not wait for it.
  absl::Status OnEachRank(const Job& job);
  absl::Status AllocateKvCache(const ModelRunnerOptions& options, int64_t max_sequences);
  void Publish(const Job* job);
  void ServeRank(size_t rank);

  const ModelConfig config_;
  const contract::RopeTable rope_;
  ThreadGroup group_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  int32_t num_pages_ = 0;

  // How long who waits for a job, or for its end, stays awake: a step has two jobs, of which the
  // second follows at once. Zero where there are not cores enough.
  const std::chrono::microseconds awake_;
  const Job* job_ = nullptr;           // the last one published; null: the ranks' threads end
  std::atomic<uint32_t> num_jobs_{0};  // published
  std::atomic<uint32_t> num_busy_{0};  // ranks at work on job_
  std::mutex failure_mutex_;           // between ranks at work
  absl::Status failure_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_MODEL_RUNNER_H_
