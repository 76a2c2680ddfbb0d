// Drives one Compare call.
#include "trainer_bridge/comparator/compare_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/config/sampling_params.h"
#include "trainer_bridge/comparator/compare_request.h"
#include "trainer_bridge/comparator/pairing.h"

namespace isobit {
namespace {

constexpr std::chrono::seconds kInfoTimeout(10);
constexpr std::chrono::milliseconds kRetryAfter(1000);
constexpr uint32_t kGapsPerEvent = 256;

uint32_t MaxTokens(const v1::CompareRequest& request) {
  const v1::SamplingParams& sampling = request.sampling();
  return sampling.has_max_tokens() ? sampling.max_tokens() : SamplingParams().max_tokens;
}

using GenerateStream = UpstreamStream<v1::GenerateRequest, v1::GenerateResponse>;
using ScoreStream = UpstreamStream<v1::ScoreRequest, v1::ScoreResponse>;

// The memory of tokens that are appended to others; arrays may be half empty.
size_t BytesOf(const v1::TokenLogprobs& tokens) {
  constexpr size_t kTokenBytes = 32;
  constexpr size_t kRowBytes = 128;  // a token's list of alternatives; below, each of them
  constexpr size_t kAlternativeBytes = 16;
  size_t bytes = static_cast<size_t>(tokens.token_ids_size()) * kTokenBytes;
  for (const v1::TopLogprobs& top : tokens.top()) {
    bytes += kRowBytes + static_cast<size_t>(top.token_ids_size()) * kAlternativeBytes;
  }
  return bytes;
}

// INVALID_ARGUMENT and the like from an upstream's data are its fault, not our client's.
absl::Status AsUpstreamFault(const absl::Status& status) {
  return absl::IsInvalidArgument(status) ? absl::InternalError(status.message()) : status;
}

// A service that refuses the comparator's credentials does not refuse our client's.
absl::Status AsOurFault(const absl::Status& status) {
  const bool is_refusal = absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status);
  return is_refusal ? absl::FailedPreconditionError(status.message()) : status;
}

}  // namespace

grpc::ServerWriteReactor<v1::CompareEvent>* CompareSession::Start(
    grpc::CallbackServerContext* context, v1::CompareRequest request,
    std::shared_ptr<Upstreams> upstreams, std::shared_ptr<History> history,
    std::shared_ptr<Recording> recording, HeldBytes memory, AdmitTokens admit) {
  const std::shared_ptr<CompareSession> session(new CompareSession(
      std::move(request), DeadlineOf(*context), std::move(upstreams), std::move(history),
      std::move(recording), std::move(memory), std::move(admit)));
  session->writer_ = StreamWriter<v1::CompareEvent>::Start(
      context, {.on_cancel = [session] { session->OnCancel(); },
                .on_writable = [session] { session->OnWritable(); }});
  grpc::ServerWriteReactor<v1::CompareEvent>* reactor = session->writer_.get();
  session->Begin();
  return reactor;
}

CompareSession::CompareSession(v1::CompareRequest request, SteadyTime deadline,
                               std::shared_ptr<Upstreams> upstreams,
                               std::shared_ptr<History> history,
                               std::shared_ptr<Recording> recording, HeldBytes memory,
                               AdmitTokens admit)
    : request_(std::move(request)),
      deadline_(deadline),
      upstreams_(std::move(upstreams)),
      history_(std::move(history)),
      recording_(std::move(recording)),
      admit_(std::move(admit)),
      comparison_(history_->Begin()),
      prompts_(request_.prompts_size()),
      memory_(std::move(memory)),
      bytes_(kCallBytes + request_.SpaceUsedLong() + prompts_.size() * sizeof(Prompt)) {}

void CompareSession::Begin() {
  absl::Status valid = ValidateCompareRequest(request_);
  if (valid.ok()) {
    bytes_ += SamplesPerPrompt(request_) * prompts_.size() * sizeof(Sample);
    valid = memory_.Resize(bytes_);
  }
  if (!valid.ok()) {
    std::lock_guard<std::mutex> lock(mutex_);
    return Fail(valid);
  }
  const auto deadline = std::min(deadline_, std::chrono::steady_clock::now() + kInfoTimeout);
  FetchInfos(*upstreams_, deadline,
             [self = shared_from_this()](const UpstreamInfos& infos) { self->OnInfos(infos); });
}

void CompareSession::OnInfos(const UpstreamInfos& infos) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (over_) return;
  if (const absl::Status comparable = CheckInfos(infos); !comparable.ok()) {
    if (absl::IsFailedPrecondition(comparable)) history_->Refuse(comparable);
    return Fail(comparable);
  }
  StartPrompts();
}

absl::Status CompareSession::CheckInfos(const UpstreamInfos& infos) {
  ISOBIT_RETURN_IF_ERROR(infos.rollout.status());
  ISOBIT_RETURN_IF_ERROR(infos.scorer.status());
  rollout_ = IdentityOf(infos.rollout->server());
  scorer_ = IdentityOf(infos.scorer->server());
  const uint32_t max_n = infos.rollout->max_n();
  if (SamplesPerPrompt(request_) > max_n) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.n: ", SamplesPerPrompt(request_), ", expected at most ", max_n));
  }
  const uint32_t context = infos.rollout->server().model().context_length();
  if (MaxTokens(request_) > context) {
    return absl::InvalidArgumentError(absl::StrCat("sampling.max_tokens: ", MaxTokens(request_),
                                                   ", expected at most ", context,
                                                   ", the context length of the rollout"));
  }
  ISOBIT_RETURN_IF_ERROR(CheckSides(rollout_, scorer_, request_.allow_weight_mismatch()));
  return admit_(AmountsOf(request_).tokens);
}

absl::Status CompareSession::Hold(Sample& sample, const v1::TokenLogprobs& tokens) {
  const size_t bytes = BytesOf(tokens);
  const absl::Status held = memory_.Resize(bytes_ + bytes + 2 * writer_->queued_bytes());
  if (!held.ok()) return WithRetryAfter(held, kRetryAfter);
  bytes_ += bytes;
  sample.bytes += bytes;
  return absl::OkStatus();
}

void CompareSession::Release(Sample& sample) {
  sample.rollout = v1::TokenLogprobs();  // Clear would keep the memory
  sample.scorer = v1::TokenLogprobs();
  bytes_ -= std::exchange(sample.bytes, 0);
  memory_.Resize(bytes_ + 2 * writer_->queued_bytes()).IgnoreError();
}

void CompareSession::StartPrompts() {
  while (!over_ && num_started_ < prompts_.size() &&
         num_started_ - num_reported_ < Concurrency(request_)) {
    StartGenerate(num_started_++);
  }
}

void CompareSession::StartGenerate(size_t prompt) {
  prompts_[prompt].samples.resize(SamplesPerPrompt(request_));
  v1::GenerateRequest request;
  *request.mutable_prompt_token_ids() = request_.prompts(static_cast<int>(prompt)).token_ids();
  *request.mutable_sampling() = request_.sampling();
  request.set_logprob_mode(request_.logprob_mode());
  calls_.insert(GenerateStream::Begin(
      deadline_, std::move(request),
      [this](auto* context, auto* message, auto* reactor) {
        upstreams_->rollout->async()->Generate(context, message, reactor);
      },
      [self = shared_from_this(), prompt](const v1::GenerateResponse& response) {
        self->OnGenerated(prompt, response);
      },
      [self = shared_from_this(), prompt](const absl::Status& status,
                                          const GenerateStream::Context& call) {
        self->OnGenerateDone(prompt, status, call);
      }));
}

void CompareSession::OnGenerated(size_t prompt, const v1::GenerateResponse& response) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (over_) return;
  const absl::Status taken = TakeGenerated(prompt, response);
  if (!taken.ok()) return Fail(taken);
  if (response.event_case() == v1::GenerateResponse::kComplete) {
    const size_t sample = response.complete().index();
    if (prompts_[prompt].samples[sample].rollout.token_ids().empty()) {
      Conclude(prompt, sample);
    } else {
      StartScore(prompt, sample);
    }
  }
}

absl::Status CompareSession::TakeGenerated(size_t prompt, const v1::GenerateResponse& response) {
  std::vector<Sample>& samples = prompts_[prompt].samples;
  const bool is_chunk = response.event_case() == v1::GenerateResponse::kChunk;
  const size_t index = is_chunk ? response.chunk().index() : response.complete().index();
  if (index >= samples.size() || samples[index].completed) {
    return absl::InternalError(absl::StrCat("rollout Generate: event for sample ", index,
                                            ", which does not exist or is complete"));
  }
  Sample& sample = samples[index];
  if (is_chunk) {
    ISOBIT_RETURN_IF_ERROR(Hold(sample, response.chunk().tokens()));
    sample.rollout.MergeFrom(response.chunk().tokens());
    return absl::OkStatus();
  }
  sample.complete = response.complete();
  sample.completed = true;
  return absl::OkStatus();
}

void CompareSession::OnGenerateDone(size_t prompt, const absl::Status& status,
                                    const std::shared_ptr<grpc::ClientContext>& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  calls_.erase(call);
  if (over_) return;
  if (!status.ok()) {
    return Fail(AsOurFault(Annotate(status, absl::StrCat("rollout Generate, prompt ", prompt))));
  }
  for (size_t i = 0; i < prompts_[prompt].samples.size(); ++i) {
    if (prompts_[prompt].samples[i].completed) continue;
    return Fail(
        absl::InternalError(absl::StrCat("rollout Generate, sequence ", SequenceId(prompt, i),
                                         ": stream ended before the sample was complete")));
  }
}

void CompareSession::StartScore(size_t prompt, size_t sample) {
  v1::ScoreRequest request;
  v1::ScoreSequence* sequence = request.add_sequences();
  sequence->set_sequence_id(SequenceId(prompt, sample));
  *sequence->mutable_prompt_token_ids() = request_.prompts(static_cast<int>(prompt)).token_ids();
  *sequence->mutable_completion_token_ids() = prompts_[prompt].samples[sample].rollout.token_ids();
  *request.mutable_sampling() = request_.sampling();
  request.set_logprob_mode(request_.logprob_mode());
  calls_.insert(ScoreStream::Begin(
      deadline_, std::move(request),
      [this](auto* context, auto* message, auto* reactor) {
        upstreams_->scorer->async()->Score(context, message, reactor);
      },
      [self = shared_from_this(), prompt, sample](const v1::ScoreResponse& response) {
        self->OnScored(prompt, sample, response);
      },
      [self = shared_from_this(), prompt, sample](const absl::Status& status,
                                                  const ScoreStream::Context& call) {
        self->OnScoreDone(prompt, sample, status, call);
      }));
}

void CompareSession::OnScored(size_t prompt, size_t sample, const v1::ScoreResponse& response) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (over_) return;
  const absl::Status taken = TakeScore(prompts_[prompt].samples[sample], response);
  if (!taken.ok()) {
    history_->Refuse(
        taken, MissingTokens(prompts_[prompt].samples[sample].rollout, response.completion()));
    return Fail(Annotate(taken, absl::StrCat("sequence ", SequenceId(prompt, sample))));
  }
  if (recording_ != nullptr) Record(prompt, sample);
  Conclude(prompt, sample);
}

void CompareSession::Record(size_t prompt, size_t sample) const {
  v1::TappedSample record;
  record.set_request_id(SequenceId(prompt, sample));
  *record.mutable_prompt_token_ids() = request_.prompts(static_cast<int>(prompt)).token_ids();
  *record.mutable_sampling() = request_.sampling();
  *record.mutable_tokens() = prompts_[prompt].samples[sample].rollout;
  *record.mutable_complete() = prompts_[prompt].samples[sample].complete;
  recording_->Add(std::move(record));
}

// Checks the sides again: their weights may have changed since the session's start.
absl::Status CompareSession::TakeScore(Sample& sample, const v1::ScoreResponse& response) {
  if (sample.scored) return absl::InternalError("scorer sent a second result");
  ISOBIT_RETURN_IF_ERROR(CheckSides(IdentityOf(sample.complete), IdentityOf(response),
                                    request_.allow_weight_mismatch()));
  if (sample.complete.logprob_mode() != response.logprob_mode()) {
    return absl::FailedPreconditionError(
        absl::StrCat("logprob modes must be equal: rollout has ",
                     v1::LogprobMode_Name(sample.complete.logprob_mode()), ", scorer has ",
                     v1::LogprobMode_Name(response.logprob_mode())));
  }
  ISOBIT_RETURN_IF_ERROR(AsUpstreamFault(
      CheckTokens(sample.rollout, response.completion(), request_.allow_weight_mismatch())));
  ISOBIT_RETURN_IF_ERROR(Hold(sample, response.completion()));
  sample.scorer = response.completion();
  sample.scored = true;
  return absl::OkStatus();
}

void CompareSession::OnScoreDone(size_t prompt, size_t sample, const absl::Status& status,
                                 const std::shared_ptr<grpc::ClientContext>& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  calls_.erase(call);
  if (over_) return;
  const std::string where = absl::StrCat("scorer Score, sequence ", SequenceId(prompt, sample));
  if (!status.ok()) return Fail(AsOurFault(Annotate(status, where)));
  if (!prompts_[prompt].samples[sample].scored) {
    Fail(absl::InternalError(absl::StrCat(where, ": stream ended without a result")));
  }
}

void CompareSession::Conclude(size_t prompt, size_t index) {
  Sample& sample = prompts_[prompt].samples[index];
  sample.outcome = CompareTokens(SequenceId(prompt, index), sample.rollout, sample.scorer);
  history_->Add(sample.outcome);
  sample.outcome.strip = {};  // the summary does not need these
  sample.outcome.worst = {};
  pending_.push_back({prompt, index, 0});
  Emit();
}

void CompareSession::Emit() {
  while (!over_ && !pending_.empty()) {
    Pending& pending = pending_.front();
    if (!EmitGaps(pending) || !EmitReport(pending)) return;
    Prompt& prompt = prompts_[pending.prompt];
    Release(prompt.samples[pending.sample]);
    if (++prompt.num_reported == prompt.samples.size()) ++num_reported_;
    pending_.pop_front();
  }
  if (over_) return;
  if (num_reported_ < prompts_.size()) return StartPrompts();
  v1::CompareEvent event;
  *event.mutable_summary() = Summarize();
  if (!Send(std::move(event))) return;
  over_ = true;
  writer_->Finish(absl::OkStatus());
}

// True if all gaps of the sequence are written.
bool CompareSession::EmitGaps(Pending& pending) {
  const Sample& sample = prompts_[pending.prompt].samples[pending.sample];
  const uint32_t num_tokens = static_cast<uint32_t>(sample.rollout.token_ids_size());
  if (request_.gap_detail() == v1::GAP_DETAIL_NONE) return true;
  const bool unequal_only = request_.gap_detail() == v1::GAP_DETAIL_UNEQUAL;
  while (pending.next_position < num_tokens) {
    v1::CompareEvent event;
    event.mutable_gaps()->set_sequence_id(sample.outcome.sequence_id);
    const uint32_t end = std::min(num_tokens, pending.next_position + kGapsPerEvent);
    for (uint32_t i = pending.next_position; i < end; ++i) {
      v1::TokenGap gap = MakeTokenGap(i, sample.rollout, sample.scorer);
      if (!unequal_only || !gap.equal() || gap.impossible())
        *event.mutable_gaps()->add_gaps() = std::move(gap);
    }
    if (event.gaps().gaps_size() > 0 && !Send(std::move(event))) return false;
    pending.next_position = end;
  }
  return true;
}

bool CompareSession::EmitReport(const Pending& pending) {
  const Sample& sample = prompts_[pending.prompt].samples[pending.sample];
  v1::CompareEvent event;
  *event.mutable_sequence() = MakeReport(sample.outcome);
  event.mutable_sequence()->set_prompt_index(static_cast<uint32_t>(pending.prompt));
  event.mutable_sequence()->set_sample_index(static_cast<uint32_t>(pending.sample));
  event.mutable_sequence()->set_finish_reason(sample.complete.finish_reason());
  return Send(std::move(event));
}

// False: the reader must make room first; then OnWritable calls Emit again.
bool CompareSession::Send(v1::CompareEvent event) {
  return writer_->Write(std::move(event)) == WriteResult::kQueued;
}

v1::CompareSummary CompareSession::Summarize() const {
  SummaryBuilder builder;
  for (const Prompt& prompt : prompts_) {
    for (const Sample& sample : prompt.samples) builder.Add(sample.outcome);
  }
  v1::CompareSummary summary = builder.Build();
  *summary.mutable_rollout() = rollout_;
  *summary.mutable_scorer() = scorer_;
  return summary;
}

void CompareSession::OnWritable() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!over_) Emit();
}

void CompareSession::OnCancel() {
  std::lock_guard<std::mutex> lock(mutex_);
  Fail(absl::CancelledError("cancelled by the client"));
}

void CompareSession::Fail(const absl::Status& status) {
  if (over_) return;
  over_ = true;
  pending_.clear();
  for (const auto& call : calls_) call->TryCancel();
  writer_->Finish(status);
}

std::string CompareSession::SequenceId(size_t prompt, size_t sample) const {
  const std::string& id = request_.prompts(static_cast<int>(prompt)).prompt_id();
  return id.empty() ? absl::StrCat(prompt, "/", sample) : absl::StrCat(id, "/", sample);
}

}  // namespace isobit
