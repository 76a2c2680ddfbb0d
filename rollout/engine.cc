// Requests and steps. Pauses and weight updates are in engine_control.cc. See engine.h.
#include "rollout/engine.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "rollout/step_planner.h"

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

uint64_t RandomSeed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// The filters may have left fewer candidates than were asked for.
std::vector<TokenLogProb> WithoutUnused(std::vector<TokenLogProb> top) {
  top.erase(std::find_if(top.begin(), top.end(), [](const auto& t) { return t.id < 0; }),
            top.end());
  return top;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const ModelConfig& config,
                                                       const EngineOptions& options) {
  ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<ModelRunner> runner,
                          ModelRunner::Create(config, options.runner,
                                              static_cast<int64_t>(options.scheduler.max_running),
                                              options.scheduler.max_batch_tokens));
  return std::unique_ptr<Engine>(new Engine(config, options, std::move(runner)));
}

Engine::Engine(const ModelConfig& config, const EngineOptions& options,
               std::unique_ptr<ModelRunner> runner)
    : config_(config),
      options_(options),
      limits_(LimitsOf(config, options)),
      depth_(static_cast<size_t>(runner->depth())),
      pages_(options.runner.num_pages, options.runner.page_size),
      scheduler_(options.scheduler, pages_),
      runner_(std::move(runner)) {
  ISOBIT_CHECK(depth_ >= 1 && depth_ <= slots_.size()) << "depth " << depth_;
}

Engine::~Engine() { Stop(); }

void Engine::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  emitter_.Stop();
  if (stager_.joinable()) stager_.join();
  while (num_in_flight() > 0 && runner_->Collect(SlotOf(num_collected_).model).ok()) {
    ++num_collected_;
  }
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
  const Clock::time_point expiry = next_expiry_;
  changed_.wait_until(lock, expiry, [this] {
    // A pause or an update that waits for the last request to finish has waited long enough.
    return stopping_ || num_in_flight() > 0 || attention_ || !pauses_.empty() ||
           switch_.is_waiting() || (!paused_ && scheduler_.HasWork());
  });
  return !stopping_;
}

bool Engine::Step() {
  Settle();
  const bool launched = LaunchNext();
  const bool collects = num_in_flight() > 0 && (!launched || num_in_flight() == depth_);
  if (collects) CollectOldest();
  emitter_.Emit(outbox_);
  return launched || collects;
}

bool Engine::LaunchNext() {
  std::vector<Sequence*> batch = Schedule();
  if (batch.empty()) return false;
  StepInFlight& step = SlotOf(num_launched_++);
  Prepare(std::move(batch), step);
  if (const absl::Status status = runner_->Launch(step.model); !status.ok()) {
    const std::lock_guard lock(mutex_);
    Fail(status);
  }
  return true;
}

std::vector<Sequence*> Engine::Schedule() {
  const std::lock_guard lock(mutex_);
  return paused_ || hold_launches_ ? std::vector<Sequence*>() : scheduler_.Schedule();
}

void Engine::Prepare(std::vector<Sequence*> batch, StepInFlight& step) {
  ModelStep& model = step.model;
  ClearStep(model);
  for (Sequence* sequence : batch) {
    if (sequence->sampling == nullptr) {
      sequence->request->BeginSampling(*sequence, config_.eos_token_ids);
    }
    const bool fed = sequence->num_pending > 0;
    const PlannedRequests planned = PlanSequence({.tokens = sequence->tokens,
                                                  .num_cached = sequence->num_cached,
                                                  .fed_by = fed ? sequence->row : -1},
                                                 sequence->pages.data(), model);
    LogProbRequest& request = model.requests[planned.first_draw];
    request.sampling = sequence->sampling->NextRow(sequence->num_pending);
    request.raw = sequence->request->raw_logprobs;
    request.top_logprobs = static_cast<int32_t>(sequence->request->logprobs);

    sequence->row = static_cast<int32_t>(planned.first_draw);
    sequence->num_cached += model.batch.sequences.back().num_rows;
    ++sequence->num_pending;
  }
  model.results.resize(model.requests.size());
  step.sequences = std::move(batch);
}

void Engine::CollectOldest() {
  StepInFlight& step = SlotOf(num_collected_);
  const absl::Status status = runner_->Collect(step.model);
  {
    const std::lock_guard lock(mutex_);
    if (!status.ok()) return Fail(status);
    Commit(step);
  }
  step.closed.clear();
  step.ended.clear();
  ++num_collected_;
}

void Engine::Commit(StepInFlight& step) {
  for (size_t i = 0; i < step.sequences.size(); ++i) {
    Sequence& sequence = *step.sequences[i];
    if (sequence.state != Sequence::State::kFinished) CommitToken(sequence, step.model.results[i]);
  }
  for (const Sequence* sequence : step.sequences) {
    const Request& request = *sequence->request;
    if (request.failure.ok() && request.num_unfinished > 0) continue;
    const auto it = requests_.find(request.ticket);
    if (it != requests_.end()) Close(it, request.failure);  // else: closed by an earlier sample
  }
}

void Engine::CommitToken(Sequence& sequence, LogProbResult& result) {
  Request& request = *sequence.request;
  if (!result.finite || !std::isfinite(result.token.logprob)) {
    request.failure = absl::InternalError(absl::StrCat(
        "sample ", sequence.sample, ": the logits at position ", sequence.tokens.size(),
        " (completion token ", sequence.sampling->num_completion_tokens(), ") are not finite"));
    return;
  }
  const int32_t token = result.token.id;
  --sequence.num_pending;
  sequence.tokens.push_back(token);
  sequence.sampling->Append(token);
  if (sequence.weights != version_) sequence.weights = version_;
  outbox_.push_back(TokenEmission{.sink = request.sink.get(),
                                  .sample = sequence.sample,
                                  .token = {.id = token,
                                            .logprob = result.token.logprob,
                                            .weight_version = version_->id,
                                            .top = WithoutUnused(std::move(result.top))}});
  if (sequence.sampling->IsStop(token)) {
    EndSequence(sequence, {.reason = FinishReason::kStop, .stop_token = token});
  } else if (sequence.sampling->num_completion_tokens() == request.max_tokens) {
    EndSequence(sequence, {.reason = FinishReason::kLength});
  }
}

void Engine::EndSequence(Sequence& sequence, SampleEnd end) {
  Request& request = *sequence.request;
  scheduler_.Remove(sequence);
  --request.num_unfinished;
  end.num_prompt_tokens = request.num_prompt_tokens;
  end.num_completion_tokens =
      static_cast<uint32_t>(sequence.tokens.size()) - request.num_prompt_tokens;
  end.seed = request.seed;
  end.weight_version = sequence.weights != nullptr ? *sequence.weights : *version_;
  end.num_preemptions = sequence.num_preemptions;
  outbox_.push_back([sink = request.sink, sample = sequence.sample, end = std::move(end)] {
    sink->OnSampleEnd(sample, end);
  });
  // Other samples may run for long. A step in flight may point into the sampling state, as below.
  sequence.tokens = {};
  if (sequence.sampling != nullptr && num_in_flight() > 0) {
    SlotOf(num_launched_ - 1).ended.push_back(std::move(sequence.sampling));
  }
  sequence.sampling = nullptr;
}

Engine::Requests::iterator Engine::Close(Requests::iterator it, const absl::Status& status) {
  Request& request = *it->second;
  for (const auto& sequence : request.samples) {
    if (sequence->state != Sequence::State::kFinished) scheduler_.Remove(*sequence);
  }
  outbox_.push_back([sink = request.sink, status] { sink->OnDone(status); });
  tickets_.erase(request.id);
  // INVARIANT: a step in flight may point into the request, so this outlives the last one launched
  // (EngineTest.StepsInFlightOutliveTheirRequests).
  if (num_in_flight() > 0) SlotOf(num_launched_ - 1).closed.push_back(std::move(it->second));
  return requests_.erase(it);
}

void Engine::Fail(const absl::Status& failure) {
  ISOBIT_LOG(Error) << "a rank has failed: " << failure.ToString();
  failure_ = failure;
  attention_ = true;  // for pauses and updates that wait
  while (!requests_.empty()) {
    Close(requests_.begin(),
          absl::UnavailableError(absl::StrCat("the engine has failed: ", failure.message())));
  }
  // What is in flight is never collected; its slots stay as they are, since none is launched.
  num_collected_ = num_launched_;
  if (options_.on_failure) outbox_.push_back([this, failure] { options_.on_failure(failure); });
}

absl::Status Engine::Available() const {
  if (!failure_.ok()) {
    return absl::UnavailableError(absl::StrCat("the engine has failed: ", failure_.message()));
  }
  return draining_ ? absl::UnavailableError("the server is draining") : absl::OkStatus();
}

absl::Status Engine::CheckQueue(const std::string& id, int64_t tokens) const {
  ISOBIT_RETURN_IF_ERROR(Available());
  if (version_ == nullptr) return absl::UnavailableError("the weights are not loaded yet");
  if (tickets_.count(id) != 0) {
    return absl::AlreadyExistsError(absl::StrCat("request_id: \"", id, "\" is already in flight"));
  }
  const size_t requests = scheduler_.num_waiting_requests();
  if (requests == 0) return absl::OkStatus();
  if (requests >= options_.max_waiting_requests) {
    return absl::ResourceExhaustedError(absl::StrCat("the queue is full: ", requests,
                                                     " requests wait, at most ",
                                                     options_.max_waiting_requests, " may"));
  }
  if (scheduler_.num_waiting_tokens() + tokens > options_.max_waiting_tokens) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the queue is full: ", scheduler_.num_waiting_tokens(), " tokens wait, ",
                     tokens, " more would exceed ", options_.max_waiting_tokens));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Engine::Submit(GenerationRequest request,
                                        std::shared_ptr<RequestSink> sink) {
  ISOBIT_RETURN_IF_ERROR(ValidateRequest(request, limits_));
  const int64_t tokens = static_cast<int64_t>(request.prompt.size()) * int64_t{request.sampling.n};
  {
    const std::lock_guard lock(mutex_);
    ISOBIT_RETURN_IF_ERROR(CheckQueue(request.id, tokens));
  }
  // Copies the prompt n times: not under the lock that every step needs.
  const uint64_t seed = request.sampling.seed ? *request.sampling.seed : RandomSeed();
  auto accepted = std::make_unique<Request>(std::move(request), seed, std::move(sink));

  const std::lock_guard lock(mutex_);
  ISOBIT_RETURN_IF_ERROR(CheckQueue(accepted->id, tokens));
  const uint64_t ticket = next_ticket_++;
  accepted->ticket = ticket;
  tickets_.emplace(accepted->id, ticket);
  for (const auto& sequence : accepted->samples) scheduler_.Add(*sequence);
  if (accepted->expiry < next_expiry_) {
    next_expiry_ = accepted->expiry;
    attention_ = true;  // who waits, waits for too long
  }
  requests_.emplace(ticket, std::move(accepted));
  changed_.notify_all();
  return ticket;
}

EngineLoad Engine::load() const {
  const std::lock_guard lock(mutex_);
  EngineLoad load;
  load.num_waiting_requests = scheduler_.num_waiting_requests();
  load.num_running_requests = requests_.size() - load.num_waiting_requests;
  load.num_waiting_tokens = scheduler_.num_waiting_tokens();
  load.num_free_pages = pages_.num_free();
  load.num_used_pages = pages_.num_pages() - pages_.num_free();
  load.paused = paused_;
  return load;
}

std::shared_ptr<const WeightVersion> Engine::weight_version() const {
  const std::lock_guard lock(mutex_);
  return version_;
}

}  // namespace isobit
