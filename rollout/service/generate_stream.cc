// Gathers and writes the results of one call. See generate_stream.h.
#include "rollout/service/generate_stream.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

// Tokens of one message: keeps it well below what clients accept by default (4 MiB).
constexpr size_t kMaxChunkTokens = 1024;
constexpr std::chrono::milliseconds kRetryDelay(1000);
constexpr size_t kEndBytes = 1024;  // of the message of a sample's end, and its entry here

size_t BytesOf(const SampledToken& token) {
  constexpr size_t kAllocation = 16;
  return sizeof(SampledToken) +
         (token.top.empty() ? 0 : kAllocation + token.top.capacity() * sizeof(TokenLogProb));
}

v1::FinishReason ToProto(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return v1::FINISH_REASON_STOP;
    case FinishReason::kLength:
      return v1::FINISH_REASON_LENGTH;
    case FinishReason::kAbort:
      return v1::FINISH_REASON_ABORT;
  }
  return v1::FINISH_REASON_UNSPECIFIED;
}

void Append(const SampledToken& token, v1::TokenLogprobs& tokens) {
  tokens.add_token_ids(static_cast<uint32_t>(token.id));
  tokens.add_logprobs(token.logprob);
  tokens.add_weight_versions(token.weight_version);
  if (token.top.empty()) return;
  v1::TopLogprobs& top = *tokens.add_top();
  for (const TokenLogProb& alternative : token.top) {
    top.add_token_ids(static_cast<uint32_t>(alternative.id));
    top.add_logprobs(alternative.logprob);
  }
}

}  // namespace

StreamMemory::StreamMemory(const StreamLimits& limits)
    : max_backlog_bytes(limits.max_backlog_bytes),
      requests(std::make_shared<ByteBudget>("requests that wait or run", limits.requests)),
      results(std::make_shared<ByteBudget>("results that nobody has read", limits.results)) {}

GenerateStream::GenerateStream(Engine& engine, v1::Fingerprint fingerprint,
                               const StreamMemory& memory, const std::string& client,
                               const GenerationMetrics& metrics, ChunkPacing pacing)
    : engine_(engine),
      fingerprint_(std::move(fingerprint)),
      memory_(memory),
      pacing_(pacing),
      measurement_(metrics),
      request_(memory.requests->Open(client)),
      results_(memory.results->Open(client)) {}

void GenerateStream::Start(OpenGenerateWriter open, GenerationRequest request,
                           const absl::Status& error, std::unique_ptr<TappedRequest> tapped) {
  measurement_.Arrive();
  tapped_ = std::move(tapped);
  request_id_ = request.id;
  if (request.raw_logprobs) logprob_mode_ = v1::LOGPROB_MODE_RAW;
  const auto self = shared_from_this();
  writer_ = open({.on_cancel = [self] { self->CancelRequest(); },
                  .on_writable = [self] { self->OnWritable(); }});
  const absl::StatusOr<uint64_t> ticket = error.ok() ? Submit(std::move(request)) : error;
  if (!ticket.ok()) return writer_->Finish(ticket.status());
  {
    const std::lock_guard lock(mutex_);
    ticket_ = *ticket;
  }
  if (writer_->closed()) CancelRequest();  // OnCancel may have come before there was a ticket
}

absl::StatusOr<uint64_t> GenerateStream::Submit(GenerationRequest request) {
  // First of all: n out of bounds must be INVALID_ARGUMENT. Too many bytes would ask for a retry.
  ISOBIT_RETURN_IF_ERROR(ValidateRequest(request, engine_.limits()));
  ISOBIT_RETURN_IF_ERROR(request_.Resize(BytesOf(request)));
  ISOBIT_RETURN_IF_ERROR(results_.Resize(kCallBytes));
  absl::StatusOr<uint64_t> ticket = engine_.Submit(std::move(request), shared_from_this());
  if (!absl::IsResourceExhausted(ticket.status())) return ticket;
  return WithRetryAfter(ticket.status(), kRetryDelay);  // its queue is full
}

void GenerateStream::CancelRequest() {
  uint64_t ticket = 0;
  {
    const std::lock_guard lock(mutex_);
    ticket = ticket_;
  }
  engine_.Cancel(ticket, "the client is gone");
}

void GenerateStream::OnToken(uint32_t sample, SampledToken token) {
  measurement_.OnToken(sample);
  if (tapped_ != nullptr) tapped_->AddToken(sample, token.id, token.logprob, token.weight_version);
  const std::lock_guard lock(mutex_);
  if (done_) return;  // with an error of ours
  Backlog& backlog = backlog_[sample];
  backlog_bytes_ += BytesOf(token);
  backlog.tokens.push_back(std::move(token));
  if (pacing_.final_only) return;
  if (pacing_.interval.count() == 0 || Clock::now() >= backlog.next_chunk) {
    MakeReady(sample, backlog);
  }
}

void GenerateStream::MakeReady(uint32_t sample, Backlog& backlog) {
  if (!backlog.is_ready) ready_.push_back(sample);
  backlog.is_ready = true;
}

void GenerateStream::Flush() {
  const std::lock_guard lock(mutex_);
  Write();
  CheckBacklog();
}

void GenerateStream::CheckBacklog() {
  absl::Status held = results_.Resize(kCallBytes + backlog_bytes_ + writer_->held_bytes());
  if (!pacing_.final_only && backlog_bytes_ > memory_.max_backlog_bytes) {
    held = absl::ResourceExhaustedError(absl::StrCat(
        "the reader is too slow: over ", memory_.max_backlog_bytes, " bytes wait for it"));
  }
  if (held.ok() || done_) return;
  done_ = WithRetryAfter(held, kRetryDelay);
  DropBacklog();
  writer_->Finish(*done_);
  results_.Resize(kCallBytes + writer_->held_bytes()).IgnoreError();
  const std::string reason(held.message());
  engine_.Cancel(ticket_, reason);
}

void GenerateStream::OnSampleEnd(uint32_t sample, SampleEnd end) {
  v1::GenerateComplete complete;
  complete.set_index(sample);
  complete.set_finish_reason(ToProto(end.reason));
  if (end.stop_token) complete.set_stop_token_id(static_cast<uint32_t>(*end.stop_token));
  complete.set_abort_reason(std::move(end.abort_reason));
  complete.set_num_prompt_tokens(end.num_prompt_tokens);
  complete.set_num_completion_tokens(end.num_completion_tokens);
  complete.set_seed(end.seed);
  complete.set_logprob_mode(logprob_mode_);
  *complete.mutable_fingerprint() = fingerprint_;
  complete.mutable_weight_version()->set_id(end.weight_version.id);
  complete.mutable_weight_version()->set_digest(std::move(end.weight_version.digest));
  complete.set_num_preemptions(end.num_preemptions);
  complete.set_num_cached_tokens(end.num_cached_prompt_tokens);
  complete.set_num_draft_tokens(end.num_draft_tokens);
  complete.set_num_accepted_tokens(end.num_accepted_tokens);
  measurement_.OnSampleEnd(sample, end.num_completion_tokens);
  if (tapped_ != nullptr) tapped_->End(complete);

  const std::lock_guard lock(mutex_);
  if (done_) return;  // with an error of ours
  Backlog& backlog = backlog_[sample];
  backlog_bytes_ += kEndBytes;
  backlog.complete = std::move(complete);
  MakeReady(sample, backlog);
  Write();
  CheckBacklog();
}

void GenerateStream::OnDone(const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  request_.Resize(0).IgnoreError();
  if (!done_) done_ = status;
  if (!pacing_.final_only) {  // what an interval holds back
    for (auto& [sample, backlog] : backlog_) {
      if (!backlog.tokens.empty()) MakeReady(sample, backlog);
    }
  }
  Write();
}

void GenerateStream::OnWritable() {
  const std::lock_guard lock(mutex_);
  is_full_ = false;
  Write();
  CheckBacklog();
}

void GenerateStream::Write() {
  while (!is_full_ && !ready_.empty()) {
    const uint32_t sample = ready_.front();
    switch (writer_->Write(NextMessage(sample))) {
      case WriteResult::kQueued:
        DropWritten(sample);
        break;
      case WriteResult::kFull:
        is_full_ = true;
        break;
      case WriteResult::kClosed:
        DropBacklog();
        break;
    }
  }
  if (ready_.empty() && done_) writer_->Finish(*done_);
}

v1::GenerateResponse GenerateStream::NextMessage(uint32_t sample) const {
  v1::GenerateResponse response;
  response.set_request_id(request_id_);
  const Backlog& backlog = backlog_.at(sample);
  if (backlog.tokens.empty()) {
    *response.mutable_complete() = *backlog.complete;
    return response;
  }
  response.mutable_chunk()->set_index(sample);
  const size_t count = std::min(backlog.tokens.size(), kMaxChunkTokens);
  for (size_t i = 0; i < count; ++i) {
    Append(backlog.tokens[i], *response.mutable_chunk()->mutable_tokens());
  }
  return response;
}

void GenerateStream::DropWritten(uint32_t sample) {
  ready_.pop_front();
  Backlog& backlog = backlog_[sample];
  if (backlog.tokens.empty()) {
    backlog_.erase(sample);
    backlog_bytes_ -= kEndBytes;
    return;
  }
  const auto end = backlog.tokens.begin() +
                   static_cast<std::ptrdiff_t>(std::min(backlog.tokens.size(), kMaxChunkTokens));
  for (auto it = backlog.tokens.begin(); it != end; ++it) backlog_bytes_ -= BytesOf(*it);
  backlog.tokens.erase(backlog.tokens.begin(), end);
  backlog.is_ready = false;
  if (!backlog.tokens.empty() || backlog.complete) return MakeReady(sample, backlog);
  if (pacing_.interval.count() > 0) backlog.next_chunk = Clock::now() + pacing_.interval;
}

void GenerateStream::DropBacklog() {
  backlog_.clear();
  ready_.clear();
  backlog_bytes_ = 0;
}

}  // namespace isobit
