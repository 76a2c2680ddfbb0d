// The scoring engine: a queue of jobs, N shard ranks that score them batch by batch, and the switch
// to other weights between two batches. Not here: anything of gRPC.
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
  std::string model_root;  // a directory; models lie below it
  LoadFormat load_format = LoadFormat::kAuto;
  LoadPolicy load_policy;
  int num_shards = 2;    // of all processes, in [1, kMaxShards]
  int local_shards = 0;  // of this process, the first ones; 0: all
  NumericsMode numerics = NumericsMode::kTree;
  int64_t max_context = 0;          // tokens of one sequence; 0: as many as the model has positions
  int64_t max_batch_tokens = 2048;  // of one rank's pass, at least 1; a longer sequence runs alone
  size_t max_queued_sequences = 16384;  // of all jobs
  size_t chunk_rows = 64;               // of the ranks, as ShardRanksOptions says
  RankBackend backend;
  // With fewer local shards than all: waits for the processes of the others, before the backend is
  // made.
  std::function<absl::StatusOr<std::shared_ptr<RemoteRanks>>(const GroupIdentity& identity)>
      assemble = nullptr;
  // Called once, from the engine's thread, when a device or the group of ranks has failed: nothing
  // can be scored any more. May be null.
  std::function<void(const absl::Status&)> on_fault = nullptr;
};

// What the passes did since the start. Gathers run beside the computation: what they take matters
// as far as a pass is longer than it would be without.
struct ScorerWork {
  int64_t passes = 0;
  int64_t tokens = 0;                      // of all ranks
  std::chrono::microseconds passing{0};    // from the start to the end of each pass
  std::chrono::microseconds gathering{0};  // of it, on the rank where that took longest
};

// Thread safe.
class Scorer {
 public:
  // Loads `model_path`, whose weights become version 1, and starts the engine. Errors: as
  // OpenModel; INVALID_ARGUMENT: an option out of range, max_context over the model's positions.
  static absl::StatusOr<std::unique_ptr<Scorer>> Load(ScorerOptions options,
                                                      const std::string& model_path);
  Scorer(const Scorer&) = delete;
  Scorer& operator=(const Scorer&) = delete;
  // Stops. No call of UpdateWeights may be under way.
  ~Scorer();

  // Ends jobs that are left, and updates that wait for their switch, with UNAVAILABLE.
  void Stop();

  // Queues a valid job; its sequences fit max_context. The engine ends it exactly once, unless this
  // fails: RESOURCE_EXHAUSTED: the queue is full; FAILED_PRECONDITION: the job
  // wants other weights than those that serve (jobs that arrive while an update waits for its
  // switch are held, and compared after it); UNAVAILABLE: a fault.
  absl::Status Submit(std::shared_ptr<ScoreJob> job);

  // Tells the engine that a receiver can take more, that a job was ended from outside, or that the
  // caller of UpdateWeights has gone.
  void Wake();

  // Prepares other weights of the same model, then switches to them between two batches; blocks
  // until then. Jobs in flight are ended with ABORTED, or finish under the old weights (kWait, and
  // any other mode). Errors leave the old weights serving: those of WeightSwitch and
  // PrepareWeights; UNAVAILABLE: the engine stops, or a fault.
  absl::StatusOr<WeightUpdateResult> UpdateWeights(const WeightUpdate& update);

  const ScorerOptions& options() const { return options_; }  // with max_context resolved
  const ModelConfig& config() const { return ranks_->config(); }
  WeightVersion version() const;
  const char* ops_name() const { return ranks_->ops_name(); }

  // Bytes of parameters that one rank keeps.
  size_t shard_bytes() const;
  // Bytes of the largest block (the embedding, a layer or the head).
  size_t largest_block_bytes() const;
  // Full blocks gathered on one rank now, and the most that ever were: the maximum over the ranks.
  int resident_blocks() const { return ranks_->resident_blocks(); }
  int peak_blocks() const { return ranks_->peak_blocks(); }
  ScorerWork work() const;

 private:
  struct Queued {
    std::shared_ptr<ScoreJob> job;
    size_t next = 0;  // the first sequence that no batch has taken
  };
  using RankItems = std::vector<std::vector<ScoreItem>>;

  // `remote`: null, or the ranks of other processes, which have joined.
  static absl::StatusOr<std::unique_ptr<Scorer>> Start(ScorerOptions options,
                                                       const OpenedModel& model,
                                                       std::shared_ptr<RemoteRanks> remote);
  Scorer(ScorerOptions options, std::unique_ptr<ShardRanks> ranks,
         std::shared_ptr<RemoteRanks> remote, std::shared_ptr<const ShardedVersion> weights);

  void Run();
  RankItems TakeBatch();
  absl::Status ScoreBatch(const ShardedVersion& weights, const RankItems& items);
  // Adds a pass to what was done, and logs that from time to time.
  void Account(const RankItems& items, std::chrono::microseconds time);
  void Fault(const absl::Status& status);

  // These hold mutex_.
  void DropEndedJobs();
  void EndAllJobs(const absl::Status& status);
  absl::Status CheckRunning() const;  // UNAVAILABLE: a fault, or stopping
  absl::Status CheckVersion(const ScoreJob& job) const;
  bool HasWork() const;
  bool QuiesceFor(const WeightUpdate& update, WeightUpdateResult& result);
  void AdmitHeldJobs();

  absl::StatusOr<PreparedUpdate> Prepare(const WeightUpdate& update, uint64_t version);

  const ScorerOptions options_;
  const std::unique_ptr<ShardRanks> ranks_;
  const std::shared_ptr<RemoteRanks> remote_;  // null: all ranks are of this process

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::shared_ptr<const ShardedVersion> weights_;
  std::deque<Queued> jobs_;                      // admitted and not ended, in order of arrival
  std::vector<std::shared_ptr<ScoreJob>> held_;  // wait for a switch
  WeightSwitch switch_;                          // while it waits, new jobs are held
  bool running_ = false;                         // a batch is being scored
  bool stopping_ = false;
  absl::Status fault_;
  ScorerWork work_;
  ScorerWork logged_;  // of work_
  std::chrono::steady_clock::time_point last_log_;

  std::thread engine_;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_H_
