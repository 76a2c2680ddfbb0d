// Requests and steps. Pauses and weight updates are in engine_control.cc. See engine.h.
#include "rollout/engine/engine.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;

RequestLimits LimitsOf(const ModelConfig& config, const EngineOptions& options) {
  RequestLimits limits;
  limits.sampling = options.sampling;
  limits.sampling.vocab_size = config.vocab_size;
  limits.context_length =
      std::min<int64_t>(config.max_position_embeddings, options.runner.max_positions);
  limits.max_batch_tokens = options.scheduler.max_batch_tokens;
  limits.kv_tokens = int64_t{options.runner.num_pages} * options.runner.page_size;
  return limits;
}

PoolSize PoolSizeOf(const EngineOptions& options, const ModelRunner& ranks) {
  const ModelRunnerOptions& runner = options.runner;
  const double cached = options.prefix_cache_fraction * runner.num_pages;
  return {.num_pages = runner.num_pages,
          .page_size = runner.page_size,
          .max_cached = options.scheduler.share_prefixes ? static_cast<int32_t>(cached) : 0,
          .num_slots = ranks.num_slots(),
          .slot_rows = ranks.slot_rows()};
}

uint64_t RandomSeed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const ModelPlan& plan,
                                                       const EngineOptions& options) {
  const size_t max_running = options.scheduler.max_running;
  std::unique_ptr<Guesser> guesser;
  if (options.make_guesser) {
    ISOBIT_ASSIGN_OR_RETURN(guesser, options.make_guesser(max_running));
  }
  ISOBIT_ASSIGN_OR_RETURN(
      std::unique_ptr<ModelRunner> runner,
      ModelRunner::Create(plan, options.runner, static_cast<int64_t>(max_running),
                          options.scheduler.max_batch_tokens));
  if (guesser != nullptr && guesser->info().verify_window > 0 && !runner->has_variant()) {
    return absl::UnimplementedError("the ranks' backend has no variant pass");
  }
  EngineOptions fitted = options;
  fitted.runner.num_pages = runner->num_pages();
  return std::unique_ptr<Engine>(new Engine(plan, fitted, std::move(guesser), std::move(runner)));
}

Engine::Engine(const ModelPlan& plan, const EngineOptions& options,
               std::unique_ptr<Guesser> guesser, std::unique_ptr<ModelRunner> runner)
    : plan_(plan),
      options_(options),
      limits_(LimitsOf(plan_.config, options)),
      guesser_(std::move(guesser)),
      pipeline_(*runner, plan_.config.eos_token_ids),
      step_times_(options.runner.time_steps),
      table_(options.scheduler,
             {.max_waiting_requests = options.max_waiting_requests,
              .max_waiting_tokens = options.max_waiting_tokens},
             PoolSizeOf(options, *runner), version_, outbox_, guesser_.get()),
      runner_(std::move(runner)) {}

Engine::~Engine() { Stop(); }

void Engine::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  emitter_.Stop();
  if (preparer_.joinable()) preparer_.join();
  pipeline_.Drain();
}

void Engine::Start() {
  emitter_.Start();
  thread_ = std::thread([this] { Loop(); });
}

void Engine::Loop() {
  while (WaitForWork()) Step();
}

bool Engine::WaitForWork() {
  std::unique_lock lock(mutex_);
  const Clock::time_point expiry = table_.next_expiry();
  changed_.wait_until(lock, expiry, [this] {
    // A pause or an update may wait for the last request, which may have finished: Settle must
    // look.
    return stopping_ || pipeline_.num_in_flight() > 0 || attention_ || gate_.has_waiting_pauses() ||
           switch_.is_waiting() || (!gate_.is_paused() && table_.scheduler().HasWork());
  });
  return !stopping_;
}

bool Engine::Step() {
  step_times_.Begin();
  Settle();
  const bool launched = LaunchNext();
  const bool collects = pipeline_.num_in_flight() > 0 && (!launched || pipeline_.is_full());
  if (collects) CollectOldest();
  emitter_.Emit(outbox_);
  if (collects) step_times_.End(StepPart::kCommit);
  return launched || collects;
}

void Engine::Settle() {
  {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    if (attention_ || now >= table_.next_expiry()) table_.EndDue(now);
    attention_ = false;
    const auto jobs = gate_.Settle(pipeline_.num_in_flight(), table_, outbox_);
    SettleUpdate();
    for (const auto& job : jobs) job();
    HoldNewcomersWhileWaiting();
  }
  pipeline_.Keep(table_.ended());
  retired_.reset();
  emitter_.Emit(outbox_);
}

bool Engine::LaunchNext() {
  ScheduledStep step = Schedule();
  step_times_.End(StepPart::kSchedule);
  if (step.sequences.empty()) return false;
  if (const absl::Status status = pipeline_.Launch(std::move(step)); !status.ok()) {
    const std::lock_guard lock(mutex_);
    Fail(status);
  }
  step_times_.End(StepPart::kLaunch);
  return true;
}

ScheduledStep Engine::Schedule() {
  const std::lock_guard lock(mutex_);
  return gate_.MayLaunch() ? table_.scheduler().Schedule() : ScheduledStep();
}

void Engine::CollectOldest() {
  const absl::Status status = pipeline_.Collect();
  step_times_.End(StepPart::kWait);
  step_times_.CountStep(pipeline_.collected_times());
  {
    const std::lock_guard lock(mutex_);
    if (!status.ok()) return Fail(status);
    pipeline_.Commit(table_);
  }
  pipeline_.Retire();
  pipeline_.Keep(table_.ended());
}

void Engine::Fail(const absl::Status& failure) {
  ISOBIT_LOG(Error) << "a rank has failed: " << failure.ToString();
  gate_.Fail(failure);
  attention_ = true;  // for pauses and updates that wait
  table_.FailAll(
      absl::UnavailableError(absl::StrCat("the engine has failed: ", failure.message())));
  pipeline_.Keep(table_.ended());
  pipeline_.Abandon();
  if (options_.on_failure) outbox_.push_back([this, failure] { options_.on_failure(failure); });
}

absl::Status Engine::CheckQueue(const std::string& id, int64_t tokens) const {
  ISOBIT_RETURN_IF_ERROR(gate_.Available());
  if (asleep_ && options_.refuse_while_asleep) {
    return absl::UnavailableError("the rollout sleeps, and refuses requests until WakeUp");
  }
  return table_.CheckQueue(id, tokens);
}

void Engine::WakeThread() {
  attention_ = true;
  changed_.notify_all();
}

absl::StatusOr<uint64_t> Engine::Submit(GenerationRequest request,
                                        std::shared_ptr<RequestSink> sink) {
  ISOBIT_RETURN_IF_ERROR(ValidateRequest(request, limits_));
  const int64_t tokens = static_cast<int64_t>(request.prompt.size()) * int64_t{request.sampling.n};
  {
    const std::lock_guard lock(mutex_);
    ISOBIT_RETURN_IF_ERROR(CheckQueue(request.id, tokens));
  }
  // Before the lock, which every step needs: this copies the prompt n times.
  const uint64_t seed = request.sampling.seed ? *request.sampling.seed : RandomSeed();
  auto accepted = std::make_unique<Request>(std::move(request), seed, std::move(sink));

  const std::lock_guard lock(mutex_);
  ISOBIT_RETURN_IF_ERROR(CheckQueue(accepted->id, tokens));
  const Clock::time_point expiry = accepted->expiry;
  if (expiry < table_.next_expiry()) attention_ = true;  // the engine thread waits for too long
  const uint64_t ticket = table_.Add(std::move(accepted));
  changed_.notify_all();
  return ticket;
}

void Engine::Cancel(uint64_t ticket, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (table_.Cancel(ticket, reason)) WakeThread();
}

std::vector<std::string> Engine::Abort(absl::Span<const std::string> ids,
                                       const std::optional<std::string>& client) {
  const std::lock_guard lock(mutex_);
  WakeThread();
  return table_.Abort(ids, client);
}

std::vector<std::string> Engine::AbortAll() {
  const std::lock_guard lock(mutex_);
  WakeThread();
  return table_.Abort(table_.ids(), std::nullopt);
}

EngineLoad Engine::load() const {
  const std::lock_guard lock(mutex_);
  const Scheduler& scheduler = table_.scheduler();
  EngineLoad load;
  load.num_waiting_requests = scheduler.num_waiting_requests();
  load.num_running_requests = table_.size() - load.num_waiting_requests;
  load.num_waiting_tokens = scheduler.num_waiting_tokens();
  load.num_free_pages = table_.pages().num_free();
  load.num_used_pages = table_.pages().num_pages() - load.num_free_pages;
  load.num_cached_pages = table_.pages().num_cached();
  load.num_shared_pages = table_.pages().num_shared();
  load.prompts = scheduler.prompt_counts();
  load.num_preemptions = scheduler.num_preemptions();
  load.paused = gate_.is_paused();
  load.asleep = asleep_;
  return load;
}

std::shared_ptr<const WeightVersion> Engine::weight_version() const {
  const std::lock_guard lock(mutex_);
  return version_;
}

}  // namespace isobit
