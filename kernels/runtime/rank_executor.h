// One tensor-parallel rank: it computes steps and takes new weights. Not here: which sequences a
// step has, and the threads of ranks.
#ifndef ISOBIT_KERNELS_RUNTIME_RANK_EXECUTOR_H_
#define ISOBIT_KERNELS_RUNTIME_RANK_EXECUTOR_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/config/numerics_mode.h"
#include "common/parallel/communicator.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/contract/rope.h"
#include "kernels/model/forward_probe.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/model_plan.h"
#include "kernels/model/resident_weights.h"
#include "kernels/model/transformer.h"
#include "kernels/ops/log_probs.h"
#include "kernels/ops/paged_kv.h"

namespace isobit {

// How long a rank's device worked on a step, in seconds: measured by events on the stream (GPU) or
// by the clock (CPU).
struct DeviceTimes {
  double forward = 0;  // from its ids to its logits
  double draw = 0;     // from the logits to the results in host memory
};

// How long a waiter spins for a step (ModelStep::is_awaited) before it sleeps. In a longer step,
// waking up takes only a small share of the time.
inline constexpr std::chrono::milliseconds kMostAwake(20);

// The numerics of a rank's variant pass (RankExecutor::has_variant). Its bits are not promised.
inline constexpr NumericsMode kVariantMode = NumericsMode::kVanilla;

// One step: the rows of some sequences, and what to do with the logits of some of these rows. A
// sequence may have several requests, such as a draw after each of k tokens. In host memory. From
// Launch to Collect, the step and all that it points to must not change, except the results.
struct ModelStep {
  // Copied before anything else of the step is computed, in order.
  std::vector<PageCopy> page_copies;
  Batch batch;
  // [sequences], or empty: none. i >= 0: the first row's token is the one drawn for request i of
  // the step launched before this one; batch.ids has any id there. -1: it is in batch.ids.
  std::vector<int32_t> feeds;
  // [requests]: the batch row of each. Ascending; several draws may share a row.
  std::vector<int64_t> logit_rows;
  std::vector<LogProbRequest> requests;  // at most RankOptions::max_sequences
  std::vector<LogProbResult> results;    // [requests], set by Collect
  // Whether the variant pass computes it.
  bool variant = false;
  // Set before Collect: no other step is in flight, so the device idles until the host has the
  // results. The waiter then spins.
  bool is_awaited = false;
  DeviceTimes times;  // set by Collect of rank 0, with RankOptions::time_steps
};

// The memory that a rank has allocated on its backend, in bytes.
struct RankMemory {
  size_t weights = 0;
  size_t kv_cache = 0;
  size_t activations = 0;  // all else that steps use, with logits and scratch; 0: not counted
  size_t total() const { return weights + kv_cache + activations; }
};

// A pass over one sequence that a probe observes, apart from steps and their KV cache. No step is
// in flight. All ranks of a group get the same calls in the same order.
class ProbedRank {
 public:
  virtual ~ProbedRank() = default;

  // Allocates the pass's memory. RESOURCE_EXHAUSTED: there is none.
  virtual absl::Status PrepareProbe(const ProbePass& pass) = 0;
  // On the rank's thread. An error is final.
  virtual absl::Status RunProbe(const ProbePass& pass, ForwardProbe& probe) = 0;
  // Frees the memory, also after an error.
  virtual void DropProbe() = 0;
};

// Launch, Collect and Serve are called on one thread, the rank's own. All ranks of a group get the
// same calls in the same order. Errors are final: afterwards the ranks' states may differ.
//
// Every method is pure, so that a decorator cannot forget to forward one: it would not compile.
class RankExecutor {
 public:
  virtual ~RankExecutor() = default;
  virtual std::string backend() const = 0;  // e.g. "cpu/avx512"

  // Any thread may call it.
  virtual RankMemory memory() const = 0;

  // How many steps may be launched before the first of them is collected. 2: the host prepares a
  // step while the one before it is computed, and `feeds` may be used.
  virtual int depth() const = 0;

  // Whether there is a variant pass: it computes the layers of a step in kVariantMode, on the same
  // weights and KV cache. Tokens are drawn in the same way.
  virtual bool has_variant() const = 0;

  // The largest cache, at most `most`, for which the backend has memory, in addition to everything
  // else that the rank uses. RESOURCE_EXHAUSTED: there is none for a single page.
  virtual absl::StatusOr<CacheSize> CacheThatFits(const CacheSize& most) const = 0;
  // Allocates the KV cache. Call it once, before anything is served. RESOURCE_EXHAUSTED: it does
  // not fit.
  virtual absl::Status AllocateKvCache(const CacheSize& size) = 0;

  // Starts computing the step. Steps are collected in the order of their launch.
  virtual absl::Status Launch(const ModelStep& step) = 0;

  // Waits for the oldest launched step, which is `step`, and sets the results of the rows that this
  // rank has drawn; each row is drawn by one rank.
  virtual absl::Status Collect(ModelStep& step) = 0;

  // Null: the rank computes without a forward pass that a probe could observe.
  virtual ProbedRank* probed() = 0;
  // The rank's weights, for ResidentStore on any thread; null if it computes without weights.
  virtual ResidentWeights* weights() = 0;
  // The rank's cache; null if it computes without one, or before AllocateKvCache.
  virtual KvCache* kv_cache() = 0;

  // From the next step on, the prepared blocks are the weights; all ranks get the same version.
  // Every launched step must have been collected.
  virtual absl::Status Serve(const PreparedBlocks& prepared) = 0;
};

// What a rank's executor is made from. All references outlive it.
struct RankOptions {
  const ModelPlan& plan;
  RankShape shape;
  const contract::RopeTable& rope;
  NumericsMode mode = NumericsMode::kTree;
  int32_t page_size = 16;
  int64_t max_sequences = 0;  // sequences of a step, and requests
  int64_t max_rows = 0;       // of a step
  bool time_steps = true;     // set ModelStep::times
  Communicator& comm;         // of the ranks' threads
};

// Makes one rank's executor, on the thread that makes all of them.
using MakeRank = std::function<absl::StatusOr<std::unique_ptr<RankExecutor>>(const RankOptions&)>;

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_RANK_EXECUTOR_H_
