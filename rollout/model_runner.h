// Runs the model: one thread for each tensor-parallel rank, each with its own backend, KV cache and
// share of the weights. Not here: what is run, and when.
#ifndef ISOBIT_ROLLOUT_MODEL_RUNNER_H_
#define ISOBIT_ROLLOUT_MODEL_RUNNER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/model_config.h"
#include "common/parallel/thread_group.h"
#include "kernels/model/transformer.h"
#include "kernels/model/weights.h"
#include "kernels/ops.h"

namespace isobit {

struct ModelRunnerOptions {
  int tensor_parallel_size = 4;  // 1, 2, 4 or 8
  NumericsMode mode = NumericsMode::kTree;
  int32_t page_size = 16;     // tokens
  int32_t num_pages = 0;      // > 0
  int64_t max_positions = 0;  // of one sequence
  // A rank's backend, in host memory. Called once for each rank and once more for packing weights.
  std::function<std::unique_ptr<Ops>()> make_ops;
};

// The weights of all ranks, packed.
using ModelWeights = std::vector<std::unique_ptr<ResidentWeights>>;

class ModelRunner {
 public:
  // Allocates the KV caches and starts the threads. INVALID_ARGUMENT: tensor_parallel_size.
  // RESOURCE_EXHAUSTED: the KV caches do not fit.
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(const ModelConfig& config,
                                                             const ModelRunnerOptions& options);
  ~ModelRunner();
  ModelRunner(const ModelRunner&) = delete;
  ModelRunner& operator=(const ModelRunner&) = delete;

  // Packs a checkpoint that ValidateCheckpoint has accepted. From one thread, any thread, even
  // while a step runs. RESOURCE_EXHAUSTED: the weights do not fit.
  absl::StatusOr<std::unique_ptr<ModelWeights>> Pack(const Checkpoint& checkpoint) const;

  // Computes the batch on all ranks, and the logits of each sequence's last row. Forward and Sample
  // are called from one thread. An error is final: the ranks no longer agree on anything.
  absl::Status Forward(const Batch& batch, const ModelWeights& weights);

  // Draws (or scores) one token for each sequence of the last Forward: rows[i] belongs to its
  // sequence i; `logits` is filled in here.
  absl::Status Sample(absl::Span<LogProbRow> rows);

  std::string backend() const { return packing_ops_->name(); }

 private:
  struct Rank;

  ModelRunner(const ModelConfig& config, const ModelRunnerOptions& options);
  // Runs `job` on every rank's thread and waits for all. The error is that of the first rank to
  // fail; it ends the group, so that the other ranks do not wait for it.
  absl::Status OnEachRank(const std::function<absl::Status(Rank&)>& job);
  void ServeRank(Rank& rank);

  const ModelConfig config_;
  const contract::RopeTable rope_;
  const std::unique_ptr<Ops> packing_ops_;
  ThreadGroup group_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<float> logits_;  // [sequences of the last Forward, vocab_size]

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  const std::function<absl::Status(Rank&)>* job_ = nullptr;
  uint64_t num_jobs_ = 0;
  size_t num_busy_ = 0;  // ranks at work on job_
  bool stopping_ = false;
  absl::Status failure_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_MODEL_RUNNER_H_
