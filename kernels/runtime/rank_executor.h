// One tensor-parallel rank: it computes steps and takes new weights.
// Not here: which sequences a step holds, or how ranks become threads.
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
#include "common/checkpoint/model_config.h"
#include "common/config/numerics_mode.h"
#include "common/parallel/communicator.h"
#include "kernels/contract/rope.h"
#include "kernels/model/forward_probe.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/rank_shape.h"
#include "kernels/model/resident_weights.h"
#include "kernels/model/transformer.h"
#include "kernels/ops.h"

namespace isobit {

// How long a rank's device has worked on a step, in seconds: on GPUs by events of the stream, on
// CPUs by the clock.
struct DeviceTimes {
  double forward = 0;  // from its ids to its logits
  double draw = 0;     // from the logits to the results in host memory
};

// How long it is waited awake for a step (ModelStep::is_awaited). Of a longer one the wake-up is a
// small part.
inline constexpr std::chrono::milliseconds kMostAwake(20);

// One step: the rows of some sequences, and what is done with the logits of some of these rows. A
// sequence may have one request or several, such as a draw after each of k tokens. In host memory,
// and left as it is, but for the results, from Launch to Collect, with all that it points to.
struct ModelStep {
  // Made before anything of the step is computed, in order.
  std::vector<PageCopy> page_copies;
  Batch batch;
  // [sequences], or empty: none. i >= 0: the id of the sequence's first row is the token that the
  // step launched before this one has for its request i; batch.ids has any id there. -1: batch.ids.
  std::vector<int32_t> feeds;
  // [requests]: the batch's row of each. Ascending; several draws may share a row.
  std::vector<int64_t> logit_rows;
  std::vector<LogProbRequest> requests;  // at most RankOptions::max_sequences
  std::vector<LogProbResult> results;    // [requests], set by Collect
  // Computed by the fast path (RankExecutor::has_fast_path): its bits are promised to nobody.
  bool fast = false;
  // Before Collect: no other step is in flight, so the device idles until the host has the results.
  // Who waits for them stays awake.
  bool is_awaited = false;
  DeviceTimes times;  // set by Collect of rank 0, with RankOptions::time_steps
};

// What a rank has allocated of its backend's memory, in bytes.
struct RankMemory {
  size_t weights = 0;
  size_t kv_cache = 0;
  size_t activations = 0;  // what steps use besides, logits and scratch included; 0: not counted
  size_t total() const { return weights + kv_cache + activations; }
};

// Launch, Collect and Serve are called on one thread, the rank's own. All ranks of a group get the
// same calls in the same order. Their errors are final: the ranks no longer agree on anything.
class RankExecutor {
 public:
  virtual ~RankExecutor() = default;
  virtual std::string backend() const = 0;  // e.g. "cpu/avx512"

  // Any thread.
  virtual RankMemory memory() const { return {}; }

  // Steps that may be launched before the first of them is collected. 2: the host prepares a step
  // while the one before is computed, and `feeds` may be used.
  virtual int depth() const = 0;

  // Whether steps may be `fast`: layers are computed with other numerics, on the same weights and
  // KV cache. Draws are the same.
  virtual bool has_fast_path() const { return false; }

  // The most pages of the KV cache for which the backend has memory beside all else that the rank
  // takes. RESOURCE_EXHAUSTED: not for one.
  virtual absl::StatusOr<int32_t> KvPagesThatFit() const = 0;
  // Takes the memory of the KV cache. Once, before anything is served. RESOURCE_EXHAUSTED: it does
  // not fit.
  virtual absl::Status AllocateKvCache(int32_t num_pages) = 0;

  // Begins to compute the step. Steps are collected in the order of their launch.
  virtual absl::Status Launch(const ModelStep& step) = 0;

  // Waits for the oldest launched step, which is `step`, and sets the results of the rows that this
  // rank has drawn; each row belongs to one rank.
  virtual absl::Status Collect(ModelStep& step) = 0;

  // A pass that `probe` sees, beside the steps and their KV cache; no step is in flight.
  // PrepareProbe takes the memory for it, and DropProbe gives it back. UNIMPLEMENTED: not on this
  // backend. RESOURCE_EXHAUSTED: no memory. An error of RunProbe is final.
  virtual absl::Status PrepareProbe(const ProbePass& /*pass*/) {
    return absl::UnimplementedError("this backend computes without a forward pass to probe");
  }
  virtual absl::Status RunProbe(const ProbePass& /*pass*/, ForwardProbe& /*probe*/) {
    return absl::UnimplementedError("this backend computes without a forward pass to probe");
  }
  virtual void DropProbe() {}

  // The rank's own, for ResidentStore on any thread; null if it computes without.
  virtual ResidentWeights* weights() = 0;
  // The rank's own; null if it computes without, or before AllocateKvCache.
  virtual KvCache* kv_cache() { return nullptr; }

  // Makes the prepared blocks, of all ranks the same version, the weights of the steps to come. No
  // step is launched and not collected.
  virtual absl::Status Serve(const PreparedBlocks& prepared) = 0;
};

// What a rank's executor is made from; all outlive it.
struct RankOptions {
  const ModelConfig& config;
  RankShape shape;
  const contract::RopeTable& rope;
  NumericsMode mode = NumericsMode::kTree;
  int32_t page_size = 16;
  int64_t max_sequences = 0;  // of a step, and requests
  int64_t max_rows = 0;       // of a step
  bool time_steps = true;     // set ModelStep::times
  Communicator& comm;         // of the ranks' threads
};

// Makes one rank's executor, on the thread that makes all of them.
using MakeRank = std::function<absl::StatusOr<std::unique_ptr<RankExecutor>>(const RankOptions&)>;

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_RANK_EXECUTOR_H_
