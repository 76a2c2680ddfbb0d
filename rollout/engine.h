// The rollout engine: takes requests, runs one step after the other, gives tokens. No gRPC here.
//
// A step is scheduled, launched on the ranks, collected, committed and emitted. If the ranks can
// hold two steps (ModelRunner::depth), the engine launches a step while the one before it is still
// being computed, and commits that one meanwhile. A request ends between two launches; pauses and
// the switch of weights wait until no step is in flight. One thread does all this, except the calls
// to sinks and replies, which an Emitter makes. The engine consists of a RequestTable, a
// StepPipeline and a ControlGate.
#ifndef ISOBIT_ROLLOUT_ENGINE_H_
#define ISOBIT_ROLLOUT_ENGINE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/awaited.h"
#include "common/checkpoint/load_policy.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/weight_switch.h"
#include "kernels/model/load_format.h"
#include "rollout/control_gate.h"
#include "rollout/emitter.h"
#include "rollout/model_runner.h"
#include "rollout/request.h"
#include "rollout/request_table.h"
#include "rollout/scheduler.h"
#include "rollout/speculation.h"
#include "rollout/step_pipeline.h"
#include "rollout/step_times.h"

namespace isobit {

struct EngineOptions {
  std::string model_root;  // weights come from directories below it
  LoadFormat load_format = LoadFormat::kAuto;
  LoadPolicy load_policy;
  ModelRunnerOptions runner;
  SchedulerLimits scheduler;
  SpeculationOptions speculation;
  double prefix_cache_fraction = 1.0;    // of all KV pages, for prefixes that nobody uses
  bool refuse_while_asleep = false;      // requests; otherwise they wait
  SamplingLimits sampling;               // vocab_size is taken from the model
  size_t max_waiting_requests = 1024;    // as in QueueLimits
  int64_t max_waiting_tokens = 4 << 20;  // likewise
  // Called once, on the thread that calls sinks, when a rank has failed: no step can run any more.
  std::function<void(const absl::Status&)> on_failure;
};

struct EngineLoad {
  size_t num_running_requests = 0;
  size_t num_waiting_requests = 0;
  int64_t num_waiting_tokens = 0;
  int32_t num_used_pages = 0;
  int32_t num_free_pages = 0;    // those in the cache included
  int32_t num_cached_pages = 0;  // of the free ones, those with a prefix that nobody uses
  int32_t num_shared_pages = 0;  // of the used ones, those of several sequences
  PromptCounts prompts;          // since the start
  int64_t num_preemptions = 0;   // likewise
  bool paused = false;
  bool asleep = false;
};

enum class SleepLevel { kKvCache, kKvCacheAndWeights };
struct SleepResult {
  PauseResult paused;
  size_t released_bytes = 0;  // of all ranks
};

// Thread-safe except Start, Stop and Step. Only Stop waits for a step.
class Engine {
 public:
  // An engine without weights: UpdateWeights loads the first. INVALID_ARGUMENT:
  // tensor_parallel_size. UNIMPLEMENTED: a fast path, which the ranks do not have.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const ModelConfig& config,
                                                        const EngineOptions& options);
  // Stops, and drops requests in flight without calling their sinks and replies.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Starts a thread that steps whenever there is work, and one that calls sinks and replies.
  void Start();

  // Ends the threads after the current step, whose tokens still reach their sinks.
  void Stop();
  // Whether weights are being read and packed, for which Stop waits.
  bool is_preparing();

  // Launches a step if there is work. Collects the oldest step if no more can be in flight, or if
  // there is nothing else to do. For a caller that uses its own thread in place of Start; sinks and
  // replies are then called on it too. False: there was nothing to do.
  bool Step();

  // Queues a request and returns its ticket. INVALID_ARGUMENT: see ValidateRequest. ALREADY_EXISTS:
  // id in flight. RESOURCE_EXHAUSTED: the queue is full. UNAVAILABLE: no weights yet, draining, or
  // failed. The seed, if unset, is drawn here.
  absl::StatusOr<uint64_t> Submit(GenerationRequest request, std::shared_ptr<RequestSink> sink);

  // Ends a request before the next launch, with the tokens committed so far. `reason` is a text for
  // people. Unknown tickets are ignored.
  void Cancel(uint64_t ticket, const std::string& reason);

  // Likewise, by id. If `client` is given, ends only that client's requests, since another client
  // may use an id again before the call that had it is over. Returns the ids that were in flight.
  std::vector<std::string> Abort(absl::Span<const std::string> ids,
                                 const std::optional<std::string>& client = std::nullopt);
  std::vector<std::string> AbortAll();

  // Stops launching steps, and replies once no step is in flight; with kWait, once all accepted
  // requests have finished. FAILED_PRECONDITION: with kWait, they cannot finish because generation
  // is paused already. ABORTED: Continue came first. CANCELLED: abandoned before it took effect,
  // with no effect at all. Whoever makes is_abandoned true must call Wake.
  void Pause(PauseMode mode, Reply<PauseResult> reply, IsAbandoned is_abandoned = nullptr);

  // Undoes Pause. Returns the number of requests that go on. FAILED_PRECONDITION: asleep.
  absl::StatusOr<size_t> Continue();

  // Pauses, then gives memory back to the system. Requests that are kept are computed again after
  // WakeUp, with the same bits. Asleep already: gives back what more the level says. Errors:
  // Pause's; ABORTED: with the weights' level, an update is in progress.
  void Sleep(SleepLevel level, PauseMode mode, Reply<SleepResult> reply,
             IsAbandoned is_abandoned = nullptr);

  // Takes the memory again and continues; replies with the number of requests that go on. If the
  // weights were given back and none have come since, reads those that served from their directory
  // again, expecting their digest. Awake already: continues. Asleep as before after an error:
  // RESOURCE_EXHAUSTED: the memory is not there; FAILED_PRECONDITION: the weights came from no
  // directory; those of UpdateWeights.
  void WakeUp(Reply<size_t> reply, const IsAbandoned& is_abandoned = nullptr);

  // What a pass over `tokens` computes with the weights that serve, op by op. Generation is paused
  // meanwhile, requests kept, and goes on afterwards unless it was paused before.
  // INVALID_ARGUMENT: no tokens, too many for a step, or an id outside the vocabulary.
  // FAILED_PRECONDITION: no weights. ABORTED: generation was continued before the pass. Else the
  // errors of Pause and ModelRunner::Probe.
  void Probe(std::vector<int32_t> tokens, const ProbeWanted& wanted, Reply<ProbeResult> reply,
             IsAbandoned is_abandoned = nullptr);

  // Prepares weights in the background, then switches between two steps. Errors leave the old
  // weights serving: those of WeightSwitch and PrepareWeights; FAILED_PRECONDITION: kWait while
  // paused with requests kept; UNAVAILABLE: draining or failed.
  void UpdateWeights(WeightUpdate update, Reply<WeightUpdateResult> reply);

  // Tells the engine that a pause or an update may have been abandoned.
  void Wake();

  // Refuses new requests from now on. Those in flight finish, or end at once while paused.
  void BeginDrain();

  EngineLoad load() const;
  const StepTimes& step_times() const { return step_times_; }
  const Speculation& speculation() const { return speculation_; }
  const FastPathCounts& fast_path_counts() const { return table_.scheduler().fast_path_counts(); }
  // Null before the first load.
  std::shared_ptr<const WeightVersion> weight_version() const;

  const ModelConfig& config() const { return config_; }
  const EngineOptions& options() const { return options_; }
  const RequestLimits& limits() const { return limits_; }
  std::string backend() const { return runner_->backend(); }
  RankMemory memory() const { return runner_->memory(); }  // of the rank with the most

 private:
  Engine(const ModelConfig& config, const EngineOptions& options,
         std::unique_ptr<ModelRunner> runner);

  // The engine thread.
  void Loop();
  bool WaitForWork();  // false: stop

  // What a step consists of. Settle does what must happen between two launches.
  void Settle();
  bool LaunchNext();  // false: nothing to launch
  ScheduledStep Schedule();
  void CollectOldest();

  // Reads and packs new weights, on the preparer's thread.
  absl::StatusOr<PreparedUpdate> Prepare(const WeightUpdate& update);

  // The caller holds mutex_. The first seven run on any thread, the others on the engine's.
  absl::Status CheckQueue(const std::string& id, int64_t tokens) const;
  void HoldNewcomersWhileWaiting();
  void WakeThread();  // Settle has something to do
  void Fail(const absl::Status& failure);
  // Begins an update that replaces weights of version `present`.
  absl::Status BeginUpdate(WeightUpdate update, const WeightVersion& present,
                           Reply<WeightUpdateResult>& reply);
  // Reads the weights that served again, as their version.
  absl::Status ReloadWeights(IsAbandoned is_abandoned, Reply<WeightUpdateResult>& reply);
  // Whether the weights that served were given back and none have come since.
  bool lacks_weights() const { return asleep_ && version_ != nullptr && !runner_->has_weights(); }
  // Undoes every pause. Returns those that had not taken effect: the caller replies to them.
  std::vector<PendingPause> Resume(size_t& num_resumed);

  void SettleUpdate();
  void SettlePaused();
  absl::StatusOr<SleepResult> FallAsleep(SleepLevel level, const PauseResult& paused);
  absl::StatusOr<size_t> GetUp();
  absl::StatusOr<ProbeResult> RunProbe(const std::vector<int32_t>& tokens,
                                       const ProbeWanted& wanted);
  absl::Status CheckProbe(const std::vector<int32_t>& tokens) const;
  bool IsQuiet() { return gate_.IsQuiet(pipeline_.num_in_flight()); }
  absl::StatusOr<bool> QuiesceFor(const WeightUpdate& update);
  absl::Status SwapWeights(const PreparedRanks& prepared, InFlightMode mode,
                           WeightUpdateResult& result);

  const ModelConfig config_;
  const EngineOptions options_;
  const RequestLimits limits_;

  // Of the engine thread alone.
  Speculation speculation_;  // others read its counts
  StepPipeline pipeline_;
  std::vector<Emission> outbox_;           // for the emitter
  StepTimes step_times_;                   // others read it
  std::optional<FinishedUpdate> retired_;  // freed without the lock

  mutable std::mutex mutex_;  // guards all below, up to runner_
  std::condition_variable changed_;
  std::shared_ptr<const WeightVersion> version_;  // of the weights that serve
  RequestTable table_;
  ControlGate gate_;
  WeightSwitch switch_;
  Reply<WeightUpdateResult> update_reply_;           // of the update in progress
  std::vector<std::function<void()>> paused_calls_;  // for SettlePaused: sleep, waking up, probes
  bool asleep_ = false;
  std::string origin_;      // the directory of the weights that serve; empty: they have none
  bool attention_ = false;  // Settle has something to do
  bool stopping_ = false;

  // Declared after everything that steps in flight point to, so that the ranks end first.
  const std::unique_ptr<ModelRunner> runner_;

  Emitter emitter_;
  std::thread preparer_;  // of the last update
  std::thread thread_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_ENGINE_H_
