// The calls of Generate on several threads, and the checks of their results.
#include "trainer_bridge/trainer/sampler.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "proto/isobit/status_convert.h"
#include "trainer_bridge/trainer/stop_signal.h"

namespace isobit::trainer {
namespace {

constexpr std::chrono::milliseconds kStopPoll{50};
constexpr size_t kMaxCalls = 64;  // in flight

v1::GenerateRequest RequestFor(const Recipe& recipe, int64_t number,
                               const std::vector<int32_t>& prompt) {
  v1::GenerateRequest request;
  request.mutable_prompt_token_ids()->Assign(prompt.begin(), prompt.end());
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_temperature(static_cast<float>(recipe.temperature));
  // INVARIANT: the draw is a function of the recipe's seed and the prompt's number.
  sampling.set_seed((recipe.seed << 32) + static_cast<uint64_t>(number));
  sampling.set_n(static_cast<uint32_t>(recipe.samples));
  sampling.set_max_tokens(static_cast<uint32_t>(recipe.max_tokens));
  return request;
}

// The samples of one prompt, as their events come.
class Group {
 public:
  explicit Group(size_t samples) : sides_(samples), is_complete_(samples) {}

  absl::Status Take(const v1::GenerateResponse& response) {
    const bool is_chunk = response.has_chunk();
    const size_t index = is_chunk ? response.chunk().index() : response.complete().index();
    if (index >= sides_.size() || is_complete_[index]) {
      return absl::InternalError(absl::StrCat("an event of sample ", index, ", unexpected"));
    }
    v1::RecordSide& side = sides_[index];
    if (is_chunk) {
      side.mutable_tokens()->MergeFrom(response.chunk().tokens());
      return absl::OkStatus();
    }
    const v1::GenerateComplete& complete = response.complete();
    if (complete.finish_reason() == v1::FINISH_REASON_ABORT) {
      return absl::AbortedError(
          absl::StrCat("the rollout aborted sample ", index, ": ", complete.abort_reason()));
    }
    *side.mutable_fingerprint() = complete.fingerprint();
    *side.mutable_weight_version() = complete.weight_version();
    is_complete_[index] = true;
    return absl::OkStatus();
  }

  // All samples, which must have ended.
  absl::StatusOr<std::vector<v1::RecordSide>> Finish() && {
    const auto open = std::find(is_complete_.begin(), is_complete_.end(), false);
    if (open == is_complete_.end()) return std::move(sides_);
    return absl::InternalError(
        absl::StrCat("the end of sample ", open - is_complete_.begin(), " did not come"));
  }

 private:
  std::vector<v1::RecordSide> sides_;
  std::vector<bool> is_complete_;
};

// Every token of a sample has one logprob, and was drawn by `serving`.
absl::Status CheckSide(const v1::RecordSide& side, const Services& services) {
  const v1::TokenLogprobs& tokens = side.tokens();
  const int count = tokens.token_ids_size();
  if (count == 0 || tokens.logprobs_size() != count || tokens.weight_versions_size() != count) {
    return absl::InternalError(absl::StrCat("expected a logprob and a version for each of ", count,
                                            " tokens, got ", tokens.logprobs_size(), " and ",
                                            tokens.weight_versions_size()));
  }
  const v1::WeightVersion& serving = services.serving();
  for (int i = 0; i < count; ++i) {
    if (tokens.weight_versions(i) == serving.id()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("expected token ", i, " of the present weights, ", serving.id(),
                     ", but weights ", tokens.weight_versions(i), " drew it"));
  }
  if (side.weight_version().digest() != serving.digest()) {
    return absl::FailedPreconditionError(absl::StrCat("expected weights of digest ",
                                                      serving.digest(), ", but those of ",
                                                      side.weight_version().digest(), " drew it"));
  }
  const auto shown = [](const v1::Fingerprint& fingerprint) {
    return absl::StrCat(fingerprint.hex(), " (", fingerprint.settings(), ")");
  };
  if (shown(side.fingerprint()) == shown(services.fingerprint())) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("expected the fingerprint ",
                                                    shown(services.fingerprint()), ", got ",
                                                    shown(side.fingerprint())));
}

using GroupResult = absl::StatusOr<std::vector<v1::RecordSide>>;

// The calls of a step, several at a time, which a stop or the first error ends.
class Calls {
 public:
  Calls(v1::RolloutService::Stub& stub, std::vector<v1::GenerateRequest> requests)
      : stub_(stub),
        requests_(std::move(requests)),
        results_(requests_.size(), absl::CancelledError("not begun")) {}

  // Each request's samples, in order.
  std::vector<GroupResult> Run() {
    std::vector<std::thread> threads;
    const size_t count = std::min(kMaxCalls, requests_.size());
    threads.reserve(count);
    running_ = count;
    for (size_t i = 0; i < count; ++i) threads.emplace_back([this] { Work(); });
    {
      std::unique_lock lock(mutex_);
      while (!ended_.wait_for(lock, kStopPoll, [this] { return running_ == 0; })) {
        if (StopAsked()) Cancel();
      }
    }
    for (std::thread& thread : threads) thread.join();
    return std::move(results_);
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    while (next_ < requests_.size() && !cancelled_) {
      const size_t i = next_++;
      GroupResult result = Generate(requests_[i], lock);
      if (!result.ok()) Cancel();
      results_[i] = std::move(result);
    }
    if (--running_ == 0) ended_.notify_all();
  }

  // Under `lock`, but for its calls: while a full queue refuses them, another one when the rollout
  // says, without an end.
  GroupResult Generate(const v1::GenerateRequest& request, std::unique_lock<std::mutex>& lock) {
    while (!cancelled_) {
      const auto context = std::make_shared<grpc::ClientContext>();
      contexts_.push_back(context);
      lock.unlock();
      GroupResult result = Call(request, *context);
      lock.lock();
      std::erase(contexts_, context);
      const auto pause = RetryAfter(result.status());
      if (!pause) return result;
      cancel_.wait_for(lock, *pause, [this] { return cancelled_; });
    }
    return absl::CancelledError("not begun");
  }

  GroupResult Call(const v1::GenerateRequest& request, grpc::ClientContext& context) {
    const auto reader = stub_.Generate(&context, request);
    Group group(request.sampling().n());
    v1::GenerateResponse response;
    absl::Status fault;
    while (reader->Read(&response)) {
      if (!fault.ok()) continue;  // reads to the end of the call, which is cancelled
      fault = group.Take(response);
      if (!fault.ok()) context.TryCancel();
    }
    const absl::Status ended = FromGrpcStatus(reader->Finish(), context);
    ISOBIT_RETURN_IF_ERROR(fault);
    ISOBIT_RETURN_IF_ERROR(ended);
    return std::move(group).Finish();
  }

  // Under the mutex.
  void Cancel() {
    cancelled_ = true;
    cancel_.notify_all();
    for (const auto& context : contexts_) context->TryCancel();
  }

  v1::RolloutService::Stub& stub_;
  const std::vector<v1::GenerateRequest> requests_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::condition_variable cancel_;
  size_t next_ = 0;
  size_t running_ = 0;  // threads
  bool cancelled_ = false;
  std::vector<std::shared_ptr<grpc::ClientContext>> contexts_;  // of the calls in flight
  std::vector<GroupResult> results_;
};

// The error that caused the others: those are of calls that it cancelled, or that never began.
absl::Status FirstFault(const std::vector<GroupResult>& groups, int64_t first_number) {
  absl::Status cancelled;
  for (size_t i = 0; i < groups.size(); ++i) {
    const absl::Status& status = groups[i].status();
    if (status.ok()) continue;
    const absl::Status named =
        Annotate(status, absl::StrCat("prompt ", first_number + static_cast<int64_t>(i)));
    if (!absl::IsCancelled(status)) return named;
    if (cancelled.ok()) cancelled = named;
  }
  return cancelled;
}

Completion CompletionOf(const v1::RecordSide& side, int64_t number, int32_t index,
                        const std::vector<int32_t>& prompt, const Task& task) {
  const v1::TokenLogprobs& tokens = side.tokens();
  Completion completion;
  completion.number = number;
  completion.index = index;
  completion.prompt = prompt;
  completion.tokens.assign(tokens.token_ids().begin(), tokens.token_ids().end());
  completion.logprobs.assign(tokens.logprobs().begin(), tokens.logprobs().end());
  completion.reward = task.Reward(number, completion.tokens);
  return completion;
}

}  // namespace

absl::StatusOr<Batch> Sample(Services& services, const Task& task, const Recipe& recipe,
                             int64_t step) {
  const int64_t first = step * recipe.prompts;
  std::vector<std::vector<int32_t>> prompts;
  std::vector<v1::GenerateRequest> requests;
  for (int64_t i = 0; i < recipe.prompts; ++i) {
    prompts.push_back(task.Prompt(first + i));
    requests.push_back(RequestFor(recipe, first + i, prompts.back()));
  }
  const std::vector<GroupResult> groups = Calls(services.rollout(), std::move(requests)).Run();
  if (StopAsked()) return absl::CancelledError("stopped");
  ISOBIT_RETURN_IF_ERROR(FirstFault(groups, first));
  Batch batch;
  for (size_t i = 0; i < groups.size(); ++i) {
    const int64_t number = first + static_cast<int64_t>(i);
    for (const v1::RecordSide& side : *groups[i]) {
      const auto index = static_cast<int32_t>(batch.sides.size() % groups[i]->size());
      ISOBIT_RETURN_IF_ERROR(
          Annotate(CheckSide(side, services), absl::StrCat("prompt ", number, ", sample ", index)));
      batch.completions.push_back(CompletionOf(side, number, index, prompts[i], task));
      batch.sides.push_back(side);
    }
  }
  return batch;
}

}  // namespace isobit::trainer
