// Brings a job's results to its client. See score_call.h.
#include "trainer_bridge/scorer/score_call.h"

#include <chrono>
#include <utility>

#include "common/base/status_macros.h"
#include "proto/isobit/status_convert.h"

namespace isobit {
namespace {

// About the time of a small model's batch. A client that retries too early gets the hint again.
constexpr std::chrono::milliseconds kRetryAfter(1000);

}  // namespace

std::shared_ptr<ScoreCall> ScoreCall::Open(grpc::CallbackServerContext* context, Scorer* scorer,
                                           size_t max_queued_bytes, HeldBytes memory,
                                           prometheus::Counter& tokens) {
  const std::shared_ptr<ScoreCall> call(
      new ScoreCall(scorer, max_queued_bytes, std::move(memory), tokens));
  StreamWriterOptions<v1::ScoreResponse> options;
  options.max_queued_bytes = max_queued_bytes;
  options.on_cancel = [call] { call->OnCancel(); };
  options.on_writable = [call] { call->OnWritable(); };
  call->writer_ = StreamWriter<v1::ScoreResponse>::Start(context, std::move(options));
  return call;
}

absl::Status ScoreCall::Start(const std::shared_ptr<ScoreCall>& call, ScoreRequest request,
                              std::vector<std::string> sequence_ids,
                              const v1::Fingerprint& fingerprint) {
  size_t bytes =
      kCallBytes + BytesOf(request, call->MaxUnreadTokens(request.options.sampling.logprobs));
  for (const std::string& id : sequence_ids) bytes += sizeof(std::string) + id.capacity();
  ISOBIT_RETURN_IF_ERROR(call->memory_.Resize(bytes));
  call->sequence_ids_ = std::move(sequence_ids);
  call->fingerprint_ = fingerprint;
  const auto job =
      std::make_shared<ScoreJob>(std::move(request.inputs), std::move(request.options), call);
  call->job_ = job;
  const absl::Status status = call->scorer_->Submit(job);
  return absl::IsResourceExhausted(status) ? WithRetryAfter(status, kRetryAfter) : status;
}

int64_t ScoreCall::MaxUnreadTokens(uint32_t alternatives) const {
  const size_t min_token_bytes = 8 + size_t{5} * alternatives;  // serialised
  const ScorerOptions& options = scorer_->options();
  return static_cast<int64_t>(max_queued_bytes_ / min_token_bytes) +
         options.max_batch_tokens * options.num_shards + options.max_context;
}

void ScoreCall::OnScore(SequenceScore score) {
  tokens_.Increment(
      static_cast<double>(score.completion.logprobs.size() + score.prompt.logprobs.size()));
  const std::shared_ptr<ScoreJob> job = job_.lock();  // alive, since it makes this call
  v1::ScoreResponse response =
      MakeScoreResponse(job->inputs()[score.index], job->options(), score, fingerprint_);
  response.set_sequence_id(sequence_ids_[score.index]);
  const std::lock_guard lock(mutex_);
  held_.push_back(std::move(response));
  Flush();
}

void ScoreCall::OnDone(const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  final_ = status;
  Flush();
}

bool ScoreCall::CanTakeMore() const {
  const std::lock_guard lock(mutex_);
  return held_.empty();
}

void ScoreCall::OnCancel() {
  if (const std::shared_ptr<ScoreJob> job = job_.lock()) {
    job->End(absl::CancelledError("the client is gone or its deadline has passed"));
    scorer_->Wake();
  }
}

void ScoreCall::OnWritable() {
  {
    const std::lock_guard lock(mutex_);
    Flush();
    if (!held_.empty()) return;
  }
  scorer_->Wake();
}

void ScoreCall::Flush() {
  while (!held_.empty() && writer_->Write(held_.front()) != WriteResult::kFull) held_.pop_front();
  if (held_.empty() && final_) writer_->Finish(*final_);
}

}  // namespace isobit
