// The rollout engine: takes requests, runs one step after the other, returns tokens. No gRPC here.
//
// A step is scheduled, launched on the ranks, collected, committed and emitted. If the ranks can
// hold two steps (ModelRunner::depth), the engine launches the next step while one is still being
// computed, and then commits the earlier one. Requests end only between two launches. Pauses and
// the switch of weights wait until no step is in flight. One thread does all this; only sinks and
// replies are called by another, the Emitter's. The engine consists of a RequestTable, a
// StepPipeline and a ControlGate.
#ifndef ISOBIT_ROLLOUT_ENGINE_ENGINE_H_
#define ISOBIT_ROLLOUT_ENGINE_ENGINE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/awaited.h"
#include "common/checkpoint/load_policy.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/weight_switch.h"
#include "kernels/model/load_format.h"
#include "rollout/engine/control_gate.h"
#include "rollout/engine/emitter.h"
#include "rollout/engine/model_runner.h"
#include "rollout/engine/request_table.h"
#include "rollout/engine/step_pipeline.h"
#include "rollout/engine/step_times.h"
#include "rollout/schedule/guesser.h"
#include "rollout/schedule/request.h"
#include "rollout/schedule/scheduler.h"

namespace isobit {

struct EngineOptions {
  std::string model_root;  // weights come from directories below it
  LoadFormat load_format = LoadFormat::kAuto;
  LoadPolicy load_policy;
  ModelRunnerOptions runner;
  SchedulerLimits scheduler;
  MakeGuesser make_guesser;              // null: no guesses
  double prefix_cache_fraction = 1.0;    // of all KV pages, for prefixes that no sequence uses
  bool refuse_while_asleep = false;      // refuse new requests; else they wait
  SamplingLimits sampling;               // vocab_size is taken from the model
  size_t max_waiting_requests = 1024;    // as in QueueLimits
  int64_t max_waiting_tokens = 4 << 20;  // likewise
  // Called once, on the thread that calls sinks, when a rank has failed: no further step can run.
  std::function<void(const absl::Status&)> on_failure;
};

struct EngineLoad {
  size_t num_running_requests = 0;
  size_t num_waiting_requests = 0;
  int64_t num_waiting_tokens = 0;
  int32_t num_used_pages = 0;
  int32_t num_free_pages = 0;    // includes cached pages
  int32_t num_cached_pages = 0;  // of the free ones, those that cache a prefix
  int32_t num_shared_pages = 0;  // of the used ones, those that several sequences use
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

// Thread-safe, except Start, Stop and Step. Only Stop waits for a step.
class Engine {
 public:
  // Creates an engine without weights; UpdateWeights loads the first. INVALID_ARGUMENT:
  // tensor_parallel_size is not allowed. UNIMPLEMENTED: the guesser has provisional
  // steps, for which the ranks lack a variant pass.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const ModelPlan& plan,
                                                        const EngineOptions& options);
  // Stops, and drops requests in flight without calling their sinks and replies.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Starts a thread that steps whenever there is work, and one that calls sinks and replies.
  void Start();

  // Ends the threads after the current step, whose tokens still reach their sinks.
  void Stop();
  // Whether weights are being read and packed. Stop waits for that.
  bool is_preparing();

  // Launches a step if there is work. Collects the oldest step if no more can be in flight, or if
  // there is nothing else to do. For callers that use their own thread instead of Start; sinks and
  // replies are then called on it, too. False: there was nothing to do.
  bool Step();

  // Queues a request and returns its ticket. INVALID_ARGUMENT: see ValidateRequest. ALREADY_EXISTS:
  // the id is in flight. RESOURCE_EXHAUSTED: the queue is full. UNAVAILABLE: there are no weights
  // yet, or the engine is draining or has failed. Draws the seed if it is unset.
  absl::StatusOr<uint64_t> Submit(GenerationRequest request, std::shared_ptr<RequestSink> sink);

  // Ends a request before the next launch, with the tokens committed so far. `reason` is a text for
  // people. Unknown tickets are ignored.
  void Cancel(uint64_t ticket, const std::string& reason);

  // Likewise, by id. With `client`, ends only that client's requests, since another client may
  // reuse an id before the earlier call is over. Returns the ids that were in flight.
  std::vector<std::string> Abort(absl::Span<const std::string> ids,
                                 const std::optional<std::string>& client = std::nullopt);
  std::vector<std::string> AbortAll();

  // Stops launching steps, and replies once no step is in flight; with kWait, once all accepted
  // requests have finished. FAILED_PRECONDITION: kWait while already paused; they cannot finish.
  // ABORTED: Continue came first. CANCELLED: the call was abandoned before it took effect, and has
  // no effect at all. The caller must call Wake once is_abandoned turns true.
  void Pause(PauseMode mode, Reply<PauseResult> reply, IsAbandoned is_abandoned = nullptr);

  // Undoes Pause. Returns the number of requests that go on. FAILED_PRECONDITION: asleep.
  absl::StatusOr<size_t> Continue();

  // Pauses, then frees memory. Requests that are kept are computed again after WakeUp, with the
  // same bits. If already asleep, frees whatever the new level frees in addition. Errors: those of
  // Pause; ABORTED: the level frees weights, and an update is in progress.
  void Sleep(SleepLevel level, PauseMode mode, Reply<SleepResult> reply,
             const IsAbandoned& is_abandoned = nullptr);

  // Allocates the memory again and continues; replies with the number of requests that go on. If
  // the weights were freed and none have come since, reads the earlier ones from their directory
  // again and checks their digest. If awake, only continues. After an error the engine stays
  // asleep: RESOURCE_EXHAUSTED: the memory does not suffice; FAILED_PRECONDITION: the weights came
  // from no directory; and the errors of UpdateWeights.
  void WakeUp(Reply<size_t> reply, const IsAbandoned& is_abandoned = nullptr);

  // Runs one pass over `tokens` with the weights that serve, and replies with every op's result.
  // Pauses generation for it, with requests kept; generation then goes on unless it was paused
  // before. INVALID_ARGUMENT: no tokens, too many for a step, or an id outside the vocabulary.
  // FAILED_PRECONDITION: there are no weights. ABORTED: generation was continued before the pass.
  // Also the errors of Pause and ModelRunner::Probe.
  void Probe(std::vector<int32_t> tokens, const ProbeWanted& wanted, Reply<ProbeResult> reply,
             const IsAbandoned& is_abandoned = nullptr);

  // Prepares weights in the background, then switches between two steps. After an error the old
  // weights still serve. Errors: those of WeightSwitch and PrepareWeights; FAILED_PRECONDITION:
  // kWait while paused with requests kept; UNAVAILABLE: the engine is draining or has failed.
  void UpdateWeights(WeightUpdate update, Reply<WeightUpdateResult> reply);

  // Tells the engine that a pause or an update may have been abandoned.
  void Wake();

  // Refuses new requests from now on. Those in flight finish, or end at once while paused.
  void BeginDrain();

  EngineLoad load() const;
  const StepTimes& step_times() const { return step_times_; }
  const Guesser* guesser() const { return guesser_.get(); }  // null: no guesses
  // Null before the first load.
  std::shared_ptr<const WeightVersion> weight_version() const;

  const ModelPlan& plan() const { return plan_; }
  const ModelConfig& config() const { return plan_.config; }
  const EngineOptions& options() const { return options_; }
  const RequestLimits& limits() const { return limits_; }
  std::string backend() const { return runner_->backend(); }
  RankMemory memory() const { return runner_->memory(); }  // of the rank that uses most

 private:
  Engine(const ModelPlan& plan, const EngineOptions& options, std::unique_ptr<Guesser> guesser,
         std::unique_ptr<ModelRunner> runner);

  // The engine thread.
  void Loop();
  bool WaitForWork();  // false: stop

  // The parts of a step. Settle does what must happen between two launches.
  void Settle();
  bool LaunchNext();  // false: nothing to launch
  ScheduledStep Schedule();
  void CollectOldest();

  // Reads and packs new weights, on the preparer's thread.
  absl::StatusOr<PreparedUpdate> Prepare(const WeightUpdate& update);

  // The caller holds mutex_. Any thread may call the first seven, only the engine's the others.
  absl::Status CheckQueue(const std::string& id, int64_t tokens) const;
  void HoldNewcomersWhileWaiting();
  void WakeThread();  // Settle has something to do
  void Fail(const absl::Status& failure);
  // Begins an update that replaces the weights of version `present`.
  absl::Status BeginUpdate(WeightUpdate update, const WeightVersion& present,
                           Reply<WeightUpdateResult>& reply);
  // Reads the weights that served before again, under the same version.
  absl::Status ReloadWeights(IsAbandoned is_abandoned, Reply<WeightUpdateResult>& reply);
  // Whether the weights that served were freed and none have come since.
  bool lacks_weights() const { return asleep_ && version_ != nullptr && !runner_->has_weights(); }
  // Puts a job into the gate, or refuses it at once. The caller does not hold mutex_.
  void Enqueue(PausedJob job);
  // Pauses, then calls `run` and replies with its result. Likewise.
  template <typename T>
  void RunPaused(PauseMode mode, Reply<T> reply, const IsAbandoned& is_abandoned,
                 std::function<absl::StatusOr<T>(const PauseResult&)> run) {
    Enqueue({.mode = mode,
             .reply = [reply](const absl::StatusOr<PauseResult>& p) { reply(p.status()); },
             .is_abandoned = is_abandoned,
             .run =
                 [this, reply, run = std::move(run)](const PauseResult& paused) {
                   outbox_.push_back([reply, result = run(paused)] { reply(result); });
                 }});
  }
  // Undoes every pause. Returns those that had not taken effect; the caller must reply to them.
  std::vector<PausedJob> Resume(size_t& num_resumed);
  // Likewise, and replies to them with `why`. For the engine thread, which holds mutex_.
  size_t ResumeBetweenSteps(const absl::Status& why);

  void SettleUpdate();
  absl::StatusOr<SleepResult> FallAsleep(SleepLevel level, const PauseResult& paused);
  absl::StatusOr<size_t> GetUp();
  absl::StatusOr<ProbeResult> RunProbe(const std::vector<int32_t>& tokens,
                                       const ProbeWanted& wanted);
  absl::Status CheckProbe(const std::vector<int32_t>& tokens) const;
  bool IsQuiet() { return gate_.IsQuiet(pipeline_.num_in_flight()); }
  absl::StatusOr<bool> QuiesceFor(const WeightUpdate& update);
  absl::Status SwapWeights(const PreparedRanks& prepared, InFlightMode mode,
                           WeightUpdateResult& result);

  const ModelPlan plan_;
  const EngineOptions options_;
  const RequestLimits limits_;

  // Used by the engine thread alone.
  const std::unique_ptr<Guesser> guesser_;  // null: no guesses; other threads read its counts
  StepPipeline pipeline_;
  std::vector<Emission> outbox_;           // for the emitter
  StepTimes step_times_;                   // other threads read it
  std::optional<FinishedUpdate> retired_;  // freed without the lock

  mutable std::mutex mutex_;  // guards all below, up to runner_
  std::condition_variable changed_;
  std::shared_ptr<const WeightVersion> version_;  // of the weights that serve
  RequestTable table_;
  ControlGate gate_;
  WeightSwitch switch_;
  Reply<WeightUpdateResult> update_reply_;  // of the update in progress
  bool asleep_ = false;
  std::string origin_;      // the directory of the weights that serve; empty if they came from none
  bool attention_ = false;  // Settle has something to do
  bool stopping_ = false;

  // Declared after everything that steps in flight point to, so that the ranks end first.
  const std::unique_ptr<ModelRunner> runner_;

  Emitter emitter_;
  std::thread preparer_;  // of the last update
  std::thread thread_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_ENGINE_ENGINE_H_
