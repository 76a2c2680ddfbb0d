// Runs the model: one thread and one executor for each tensor-parallel rank. The scheduler decides
// what is run, and when.
#ifndef ISOBIT_ROLLOUT_ENGINE_MODEL_RUNNER_H_
#define ISOBIT_ROLLOUT_ENGINE_MODEL_RUNNER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/config/numerics_mode.h"
#include "common/parallel/thread_group.h"
#include "kernels/runtime/rank_executor.h"
#include "kernels/runtime/rank_threads.h"

namespace isobit {

struct ModelRunnerOptions {
  int tensor_parallel_size = 4;  // 1, 2, 4 or 8
  NumericsMode mode = NumericsMode::kTree;
  int32_t page_size = 16;     // tokens
  int32_t num_pages = 0;      // 0: as many as fit into memory and can be in use
  int32_t num_slots = 0;      // if the model has slots; 0: likewise
  int64_t max_positions = 0;  // of one sequence
  bool time_steps = true;     // as RankOptions::time_steps
  MakeRank make_rank;         // the backend
};

class ModelRunner {
 public:
  // Starts the ranks' threads and makes the ranks. max_sequences, max_rows: bounds of one step.
  // INVALID_ARGUMENT: tensor_parallel_size is not allowed. RESOURCE_EXHAUSTED: no KV page fits.
  // Also the errors of make_rank.
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(const ModelPlan& plan,
                                                             const ModelRunnerOptions& options,
                                                             int64_t max_sequences,
                                                             int64_t max_rows);
  ModelRunner(const ModelRunner&) = delete;
  ModelRunner& operator=(const ModelRunner&) = delete;

  std::string backend() const { return ranks_.front()->backend(); }
  // Of the KV cache, on every rank.
  int32_t num_pages() const { return cache_size_.num_pages; }
  int32_t num_slots() const { return cache_size_.num_slots; }  // 0: the model has none
  int32_t slot_rows() const { return slots_.rows; }            // as in StateSpec
  // Of the rank that uses most.
  RankMemory memory() const;

  // Makes a store for a new version, on all ranks. One thread at a time fills it, any thread, even
  // while a step runs.
  ResidentStore NewStore() const;

  // One thread makes the calls below. They do on all ranks what RankExecutor says. After an error,
  // no call can succeed.
  int depth() const { return ranks_.front()->depth(); }
  bool has_variant() const { return ranks_.front()->has_variant(); }
  absl::Status Launch(const ModelStep& step);
  absl::Status Collect(ModelStep& step);
  absl::Status Serve(const PreparedRanks& prepared);

  // What a pass over `tokens` computes, apart from steps. No step may be in flight. Without effect:
  // UNIMPLEMENTED: this backend cannot probe; RESOURCE_EXHAUSTED: there is no memory. Any other
  // error is final.
  absl::StatusOr<ProbeReport> Probe(absl::Span<const int32_t> tokens, const ProbeWanted& wanted);

  // Frees memory of all ranks and returns the number of bytes: the KV cache's, and with `weights`
  // also that of the weights. Keys, values and weights are lost. No step may be in flight, and no
  // store may exist. An error is final.
  absl::StatusOr<size_t> Release(bool weights);
  // Allocates the KV cache again, uninitialised. RESOURCE_EXHAUSTED: it does not fit, and nothing
  // has changed.
  absl::Status RestoreKvCache();
  // Whether all ranks that compute with weights have them.
  bool has_weights() const;

 private:
  ModelRunner(const ModelPlan& plan, const ModelRunnerOptions& options);
  absl::Status AllocateKvCache(const ModelRunnerOptions& options, int64_t max_sequences);
  // If a rank fails, ends the group, so that the other ranks do not wait for it.
  absl::Status OnEachRank(absl::FunctionRef<absl::Status(RankExecutor& executor, size_t rank)> job);

  const ModelPlan plan_;
  const contract::RopeTable rope_;
  ThreadGroup group_;
  std::vector<std::unique_ptr<RankExecutor>> ranks_;
  CacheSize cache_size_;
  SlotSpec slots_;
  RankThreads threads_;  // ends before what its jobs use
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_ENGINE_MODEL_RUNNER_H_
