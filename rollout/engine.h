// The rollout engine: requests in, tokens out, one step after the other. Not here: the wire.
//
// A step is scheduled, launched on the ranks, collected, committed and emitted. Where the ranks can
// hold two (ModelRunner::depth), the host is one step behind: it launches a step while the one
// before is computed, and commits that one meanwhile. Ends of requests take effect between two
// launches; pauses and the switch of weights wait until nothing is in flight. All on one thread,
// but for the calls to sinks and replies, which an Emitter makes.
#ifndef ISOBIT_ROLLOUT_ENGINE_H_
#define ISOBIT_ROLLOUT_ENGINE_H_

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/awaited.h"
#include "common/checkpoint/load_policy.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/weight_switch.h"
#include "kernels/model/load_format.h"
#include "rollout/emitter.h"
#include "rollout/kv_pages.h"
#include "rollout/model_runner.h"
#include "rollout/request.h"
#include "rollout/scheduler.h"

namespace isobit {

struct EngineOptions {
  std::string model_root;  // weights come from directories below it
  LoadFormat load_format = LoadFormat::kAuto;
  LoadPolicy load_policy;
  ModelRunnerOptions runner;
  SchedulerLimits scheduler;
  SamplingLimits sampling;               // vocab_size is taken from the model
  size_t max_waiting_requests = 1024;    // that may queue
  int64_t max_waiting_tokens = 4 << 20;  // of prompts that may queue; an empty queue takes any one
  // Called once, as sinks are, when a rank has failed: nothing can be computed any more.
  std::function<void(const absl::Status&)> on_failure;
};

enum class PauseMode { kAbort, kWait, kKeep };
struct PauseResult {
  size_t num_aborted = 0;  // requests
  size_t num_kept = 0;     // requests that stay
};

struct EngineLoad {
  size_t num_running_requests = 0;
  size_t num_waiting_requests = 0;
  int64_t num_waiting_tokens = 0;
  int32_t num_used_pages = 0;
  int32_t num_free_pages = 0;
  bool paused = false;
};

// Receives a result or an error, on the thread that calls sinks or, if refused at once, on the
// caller's. It must not block.
template <typename T>
using Reply = std::function<void(absl::StatusOr<T>)>;

// Thread-safe but for Start, Stop and Step; only Stop waits for a step.
class Engine {
 public:
  // Without weights yet: UpdateWeights loads the first. INVALID_ARGUMENT: tensor_parallel_size.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const ModelConfig& config,
                                                        const EngineOptions& options);
  // Stops, and drops what is in flight without a word to sinks and replies.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Starts a thread that steps whenever there is work, and one that calls sinks and replies.
  void Start();

  // Ends the threads after the present step, whose tokens still reach their sinks.
  void Stop();
  // Whether weights are being read and packed, for which Stop waits.
  bool is_staging();

  // Launches a step, if there is work, and collects the oldest, once as many are in flight as can
  // be or nothing else is to do. For callers that bring their own thread instead of Start, which
  // then calls sinks and replies too. False: there was nothing to do.
  bool Step();

  // Queues a request and returns its ticket. INVALID_ARGUMENT: see ValidateRequest. ALREADY_EXISTS:
  // id in flight. RESOURCE_EXHAUSTED: the queue is full. UNAVAILABLE: no weights yet, draining, or
  // failed. The seed, if unset, is drawn here.
  absl::StatusOr<uint64_t> Submit(GenerationRequest request, std::shared_ptr<RequestSink> sink);

  // Ends a request before the next launch, with what has been committed, and `reason` for people.
  // Unknown tickets are ignored.
  void Cancel(uint64_t ticket, const std::string& reason);

  // Likewise, by id, and only those of `client` if one is given: an id is free for others before
  // the call that had it is over. Returns those that were in flight.
  std::vector<std::string> Abort(absl::Span<const std::string> ids,
                                 const std::optional<std::string>& client = std::nullopt);
  std::vector<std::string> AbortAll();

  // Stops stepping; replies once no step is in flight. With kWait, once what was accepted has
  // finished; FAILED_PRECONDITION if it cannot, since it is paused already. ABORTED: Continue came
  // first. CANCELLED: abandoned before it took effect; all is as if it had not been asked for.
  // Whoever makes is_abandoned true calls Wake.
  void Pause(PauseMode mode, Reply<PauseResult> reply, IsAbandoned is_abandoned = nullptr);

  // Undoes Pause. Returns the number of requests that go on.
  size_t Continue();

  // Stages weights in the background, then switches between two steps. Errors leave the old weights
  // serving: those of WeightSwitch and StageWeights; FAILED_PRECONDITION: kWait while paused with
  // requests kept; UNAVAILABLE: draining or failed.
  void UpdateWeights(WeightUpdate update, Reply<WeightUpdateResult> reply);

  // Tells the engine that a pause or an update may have been abandoned.
  void Wake();

  // Refuses new requests from now on. Those in flight finish, or end at once while paused.
  void BeginDrain();

  EngineLoad load() const;
  // Null before the first load.
  std::shared_ptr<const WeightVersion> weight_version() const;

  const ModelConfig& config() const { return config_; }
  const EngineOptions& options() const { return options_; }
  const RequestLimits& limits() const { return limits_; }
  std::string backend() const { return runner_->backend(); }
  RankMemory memory() const { return runner_->memory(); }  // of the rank with the most

 private:
  struct PendingPause {
    PauseMode mode;
    Reply<PauseResult> reply;
    IsAbandoned is_abandoned;
  };
  using Requests = std::map<uint64_t, std::unique_ptr<Request>>;  // by ticket: oldest first

  // A step from its launch to its commit, with all that `model` points to that may end meanwhile.
  struct StepInFlight {
    ModelStep model;
    std::vector<Sequence*> sequences;  // of model's rows; some may have finished
    // What ended while this was the last step launched.
    std::vector<std::unique_ptr<Request>> closed;
    std::vector<std::unique_ptr<SequenceSampling>> ended;
  };

  Engine(const ModelConfig& config, const EngineOptions& options,
         std::unique_ptr<ModelRunner> runner);

  // The engine thread.
  void Loop();
  bool WaitForWork();  // false: stop

  // The parts of a step. Settle does what must happen between two launches.
  void Settle();
  bool LaunchNext();  // false: nothing to launch
  std::vector<Sequence*> Schedule();
  void Prepare(std::vector<Sequence*> batch, StepInFlight& step);
  void CollectOldest();
  size_t num_in_flight() const { return num_launched_ - num_collected_; }
  StepInFlight& SlotOf(uint64_t step) { return slots_[step % slots_.size()]; }

  // Reads and packs new weights, on the stager's thread.
  absl::StatusOr<StagedUpdate> Stage(const WeightUpdate& update);

  // All below hold mutex_; the first three run on any thread.
  absl::Status Available() const;  // UNAVAILABLE when draining or failed
  // `tokens`: of all the request's prompts.
  absl::Status CheckQueue(const std::string& id, int64_t tokens) const;
  void HoldNewcomersWhileWaiting();
  void Fail(const absl::Status& failure);

  void EndRequests(std::chrono::steady_clock::time_point now);  // those aborted and expired
  void SettlePauses();
  void SettleUpdate();
  bool IsQuiet();  // nothing is in flight; if false, nothing is launched until it is
  absl::StatusOr<bool> QuiesceFor(const WeightUpdate& update);
  absl::Status SwapWeights(const std::vector<StagedBlocks>& staged, InFlightMode mode,
                           WeightUpdateResult& result);
  void Commit(StepInFlight& step);
  void CommitToken(Sequence& sequence, LogProbResult& result);
  void EndSequence(Sequence& sequence, SampleEnd end);
  // Ends what is left of the request with kAbort, then closes it with OK.
  Requests::iterator AbortRequest(Requests::iterator request, const std::string& reason);
  size_t AbortRequests(const std::string& reason);  // all of them
  // Forgets the request, frees what is left of it and emits OnDone.
  Requests::iterator Close(Requests::iterator request, const absl::Status& status);

  const ModelConfig config_;
  const EngineOptions options_;
  const RequestLimits limits_;
  const size_t depth_;  // steps that can be in flight

  // Of the engine thread alone.
  std::array<StepInFlight, 2> slots_;  // in turn
  uint64_t num_launched_ = 0;
  uint64_t num_collected_ = 0;
  std::vector<Emission> outbox_;           // for the emitter
  std::optional<FinishedUpdate> retired_;  // freed without the lock

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  KvPages pages_;
  Scheduler scheduler_;
  Requests requests_;
  std::unordered_map<std::string, uint64_t> tickets_;  // by request id
  uint64_t next_ticket_ = 1;
  std::shared_ptr<const WeightVersion> version_;  // of the weights that serve
  std::vector<PendingPause> pauses_;
  WeightSwitch switch_;
  Reply<WeightUpdateResult> update_reply_;  // of the update in progress
  // No request expires before; it may be earlier than the first that does.
  std::chrono::steady_clock::time_point next_expiry_ = std::chrono::steady_clock::time_point::max();
  bool attention_ = false;      // Settle has something to do
  bool hold_launches_ = false;  // it waits until nothing is in flight
  bool paused_ = false;
  bool draining_ = false;
  bool stopping_ = false;
  absl::Status failure_;

  // After all that steps in flight point to, so that the ranks end before it.
  const std::unique_ptr<ModelRunner> runner_;

  Emitter emitter_;
  std::thread stager_;  // of the last update
  std::thread thread_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_ENGINE_H_
