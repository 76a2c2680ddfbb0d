// Runs the model: one thread and one executor for each tensor-parallel rank. Not here: what is run,
// and when.
#ifndef ISOBIT_ROLLOUT_MODEL_RUNNER_H_
#define ISOBIT_ROLLOUT_MODEL_RUNNER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/model_config.h"
#include "common/config/numerics_mode.h"
#include "common/parallel/thread_group.h"
#include "kernels/runtime/rank_executor.h"
#include "kernels/runtime/rank_threads.h"

namespace isobit {

struct ModelRunnerOptions {
  int tensor_parallel_size = 4;  // 1, 2, 4 or 8
  NumericsMode mode = NumericsMode::kTree;
  int32_t page_size = 16;     // tokens
  int32_t num_pages = 0;      // 0: as many as fit every rank's memory and can ever be in use
  int64_t max_positions = 0;  // of one sequence
  bool time_steps = true;     // as RankOptions::time_steps
  MakeRank make_rank;         // the backend
};

class ModelRunner {
 public:
  // Starts the ranks' threads and makes the ranks. max_sequences, max_rows: of one step.
  // INVALID_ARGUMENT: tensor_parallel_size. RESOURCE_EXHAUSTED: not one KV page fits. Else
  // make_rank's errors.
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(const ModelConfig& config,
                                                             const ModelRunnerOptions& options,
                                                             int64_t max_sequences,
                                                             int64_t max_rows);
  ModelRunner(const ModelRunner&) = delete;
  ModelRunner& operator=(const ModelRunner&) = delete;

  std::string backend() const { return ranks_.front()->backend(); }
  int32_t num_pages() const { return num_pages_; }  // of the KV cache, on every rank
  // Of the rank with the most.
  RankMemory memory() const;

  // For a new version on all ranks; to be filled from one thread, any thread, even while a step
  // runs.
  ResidentStore NewStore() const;

  // The calls below come from one thread, and do on all ranks what RankExecutor says. An error is
  // final.
  int depth() const { return ranks_.front()->depth(); }
  bool has_fast_path() const { return ranks_.front()->has_fast_path(); }
  absl::Status Launch(const ModelStep& step);
  absl::Status Collect(ModelStep& step);
  absl::Status Serve(const PreparedRanks& prepared);

  // What a pass over `tokens` computes, beside the steps. No step is in flight. UNIMPLEMENTED, with
  // no effect: not on this backend. RESOURCE_EXHAUSTED, likewise: no memory. Else the error is
  // final.
  absl::StatusOr<ProbeReport> Probe(absl::Span<const int32_t> tokens, const ProbeWanted& wanted);

  // Gives memory of all ranks back to the system, and returns how many bytes: that of the KV cache,
  // and with `weights` that of the weights, too. Keys, values and weights are lost. No step is in
  // flight, and no store exists. An error is final.
  absl::StatusOr<size_t> Release(bool weights);
  // Takes the KV cache's memory again, uninitialised. RESOURCE_EXHAUSTED: it does not fit; nothing
  // has changed.
  absl::Status RestoreKvCache();
  // Whether all ranks that compute with weights have them.
  bool has_weights() const;

 private:
  ModelRunner(const ModelConfig& config, const ModelRunnerOptions& options);
  absl::Status AllocateKvCache(const ModelRunnerOptions& options, int64_t max_sequences);
  // A rank that fails ends the group, so that the other ranks do not wait for it.
  absl::Status OnEachRank(absl::FunctionRef<absl::Status(RankExecutor& executor, size_t rank)> job);

  const ModelConfig config_;
  const contract::RopeTable rope_;
  ThreadGroup group_;
  std::vector<std::unique_ptr<RankExecutor>> ranks_;
  int32_t num_pages_ = 0;
  const int32_t page_size_;
  RankThreads threads_;  // ends before what its jobs use
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_MODEL_RUNNER_H_
