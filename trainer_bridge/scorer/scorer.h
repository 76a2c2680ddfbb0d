// The scoring engine: queues jobs, scores them batch by batch on N shard ranks, and switches
// weights between two batches. No gRPC here.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/opened_model.h"
#include "common/checkpoint/weight_switch.h"
#include "common/config/numerics_mode.h"
#include "kernels/model/load_format.h"
#include "trainer_bridge/scorer/remote_ranks.h"
#include "trainer_bridge/scorer/score_job.h"
#include "trainer_bridge/scorer/shard_ranks.h"

namespace isobit {

inline constexpr int kMaxShards = 64;

struct ScorerOptions {
  std::string model_root;  // a directory; models are below it
  LoadFormat load_format = LoadFormat::kAuto;
  LoadPolicy load_policy;
  int num_shards = 2;    // in all processes, in [1, kMaxShards]
  int local_shards = 0;  // those in this process, the first ones; 0: all
  NumericsMode numerics = NumericsMode::kTree;
  int64_t max_context = 0;  // tokens of one sequence; 0: the model's positions
  int64_t max_batch_tokens =
      2048;  // of one rank in a pass, at least 1; a longer sequence runs alone
  size_t max_queued_sequences = 16384;  // of all jobs
  size_t chunk_rows = 64;               // see ShardRanksOptions
  bool prefix_sharing = true;           // likewise; the same in all processes
  RankBackend backend;
  // Only if other processes have shards, too: waits for them, before the backend is made.
  std::function<absl::StatusOr<std::shared_ptr<RemoteRanks>>(const GroupIdentity& identity)>
      assemble = nullptr;
  // Called once, on the engine's thread, when a device or the group of ranks has failed: the scorer
  // can no longer score. May be null.
  std::function<void(const absl::Status&)> on_fault = nullptr;
};

// Counts and times of all passes since the start. Gathers overlap with computation, so their time
// is not simply a share of the passes' time.
struct ScorerWork {
  int64_t passes = 0;
  int64_t tokens = 0;                      // of all ranks' sequences
  int64_t shared_tokens = 0;               // of these, not computed: on another sequence's pages
  std::chrono::microseconds passing{0};    // from the start to the end of each pass
  std::chrono::microseconds gathering{0};  // on the slowest rank of each pass
};

// Thread-safe.
class Scorer {
 public:
  // Loads `model_path` as weight version 1 and starts the engine. Errors: those of OpenModel;
  // INVALID_ARGUMENT: an option is out of range, or max_context exceeds the model's positions.
  static absl::StatusOr<std::unique_ptr<Scorer>> Load(ScorerOptions options,
                                                      const std::string& model_path);
  Scorer(const Scorer&) = delete;
  Scorer& operator=(const Scorer&) = delete;
  // Calls Stop. No call of UpdateWeights may be running.
  ~Scorer();

  // Ends all jobs, and updates that wait for their switch, with UNAVAILABLE.
  void Stop();

  // Queues a valid job, whose sequences fit into max_context. If this succeeds, the engine ends the
  // job exactly once. RESOURCE_EXHAUSTED: the queue is full. FAILED_PRECONDITION: another weight
  // version serves than the job asks for; while an update waits for its switch, jobs are held, and
  // checked after the switch. UNAVAILABLE: a fault.
  absl::Status Submit(std::shared_ptr<ScoreJob> job);

  // Tells the engine that a receiver can take more, that a job was ended elsewhere, or that the
  // caller of UpdateWeights has gone.
  void Wake();

  // Prepares other weights of the same model, then switches to them between two batches; blocks
  // until then. Jobs in flight end with ABORTED, or finish under the old weights (kWait, and any
  // other mode). After an error the old weights still serve. Errors: those of WeightSwitch and
  // PrepareWeights; UNAVAILABLE: the engine stops, or there was a fault; UNIMPLEMENTED: a stream
  // for several processes.
  absl::StatusOr<WeightUpdateResult> UpdateWeights(const WeightUpdate& update);

  // Runs one pass over `tokens` between two batches, and returns every op's result; blocks until
  // then. INVALID_ARGUMENT: there are no tokens, more than max_context or 16384, or an id is
  // outside the vocabulary. RESOURCE_EXHAUSTED: there is no memory for the pass. UNAVAILABLE: the
  // engine stops, or there was a fault.
  absl::StatusOr<ProbeResult> Probe(absl::Span<const int32_t> tokens, const ProbeWanted& wanted);

  const ScorerOptions& options() const { return options_; }  // with max_context resolved
  const ModelPlan& plan() const { return ranks_->plan(); }
  const ModelConfig& config() const { return ranks_->config(); }
  WeightVersion version() const;
  const char* ops_name() const { return ranks_->ops_name(); }

  // Bytes of parameters that one rank keeps.
  size_t shard_bytes() const;
  // Bytes of the largest block (the embedding, a layer or the head).
  size_t largest_block_bytes() const;
  // Full blocks currently gathered on one rank, and their peak; both are maxima over the ranks.
  int resident_blocks() const { return ranks_->resident_blocks(); }
  int peak_blocks() const { return ranks_->peak_blocks(); }
  ScorerWork work() const;
  size_t num_waiting() const;  // jobs with a sequence that is in no pass yet

 private:
  struct Queued {
    std::shared_ptr<ScoreJob> job;
    size_t next = 0;  // the first sequence not taken by a batch
  };
  struct Pass {
    std::vector<std::vector<ScoreItem>> items;  // of each rank
    int64_t rows = 0;                           // tokens that all ranks compute
  };

  // `remote`: the ranks of other processes, which have joined; null: there are none.
  static absl::StatusOr<std::unique_ptr<Scorer>> Start(ScorerOptions options,
                                                       const OpenedModel& model,
                                                       std::shared_ptr<RemoteRanks> remote);
  Scorer(ScorerOptions options, std::unique_ptr<ShardRanks> ranks,
         std::shared_ptr<RemoteRanks> remote, std::shared_ptr<const ShardedVersion> weights);

  void Run();
  Pass TakeBatch();
  absl::Status ScoreBatch(const ShardedVersion& weights, const Pass& pass);
  absl::StatusOr<ProbeReport> ProbeRanks(const ShardedVersion& weights,
                                         absl::Span<const int32_t> tokens,
                                         const ProbeWanted& wanted);
  // One pass of all processes. all[i] are the items of rank i; run_here computes the items of this
  // process's ranks.
  absl::Status OnAllRanks(
      const ShardedVersion& weights, absl::Span<const std::vector<ScoreItem>> all,
      absl::FunctionRef<absl::Status(absl::Span<const std::vector<ScoreItem>>)> run_here);
  // Adds a pass to work_, and sometimes logs the sums.
  void Account(const Pass& pass, std::chrono::microseconds time);
  void Fault(const absl::Status& status);

  // The caller holds mutex_.
  void DropEndedJobs();
  void EndAllJobs(const absl::Status& status);
  absl::Status CheckRunning() const;  // UNAVAILABLE: there was a fault, or the scorer stops
  absl::Status CheckVersion(const ScoreJob& job) const;
  bool HasWork() const;
  bool QuiesceFor(const WeightUpdate& update, WeightUpdateResult& result);
  void AdmitHeldJobs();

  absl::StatusOr<PreparedUpdate> Prepare(const WeightUpdate& update, uint64_t version);

  const ScorerOptions options_;
  const std::unique_ptr<ShardRanks> ranks_;
  const std::shared_ptr<RemoteRanks> remote_;  // null: this process has all ranks

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::shared_ptr<const ShardedVersion> weights_;
  bool probing_ = false;                         // a probe is running or waits for running_ to end
  std::deque<Queued> jobs_;                      // admitted and not ended, in order of arrival
  std::vector<std::shared_ptr<ScoreJob>> held_;  // waiting for a switch
  WeightSwitch switch_;                          // while an update waits, new jobs are held
  bool running_ = false;                         // a batch is being scored
  bool stopping_ = false;
  absl::Status fault_;
  ScorerWork work_;
  ScorerWork logged_;  // the part of work_ that is logged
  std::chrono::steady_clock::time_point last_log_;

  std::thread engine_;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_H_
