// Handlers of the scorer's RPCs. See scorer_service.h.
#include "trainer_bridge/scorer/scorer_service.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/rpc/cancellable_call.h"
#include "common/rpc/status_convert.h"
#include "trainer_bridge/scorer/score_call.h"

namespace isobit::scorer {
namespace {

grpc::ServerUnaryReactor* FinishAtOnce(grpc::CallbackServerContext* context,
                                       const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status, *context));
  return reactor;
}

}  // namespace

ScorerService::ScorerService(const Options& options, std::shared_ptr<CallGate> gate)
    : options_(options),
      memory_(std::make_shared<ByteBudget>("Score calls", options.memory)),
      gate_(std::move(gate)) {}

ScorerService::~ScorerService() { Stop(); }

void ScorerService::Stop() {
  if (scorer_ != nullptr) scorer_->Stop();
  updates_.clear();  // waits for them
  scorer_ = nullptr;
}

void ScorerService::SetScorer(std::unique_ptr<Scorer> scorer) {
  const std::lock_guard lock(mutex_);
  ISOBIT_CHECK(scorer_ == nullptr);
  scorer_ = std::move(scorer);
  limits_.vocab_size = scorer_->config().vocab_size;
  limits_.max_context = scorer_->options().max_context;
  limits_.max_sequences = options_.max_sequences;
  limits_.max_logprobs = options_.max_logprobs;
  fingerprint_ = FingerprintOf(*scorer_);
}

void ScorerService::BeginDrain() {
  const std::lock_guard lock(mutex_);
  draining_ = true;
}

absl::StatusOr<Scorer*> ScorerService::Available() {
  const std::lock_guard lock(mutex_);
  if (draining_) return absl::UnavailableError("the scorer is draining");
  if (scorer_ == nullptr) return absl::UnavailableError("the weights are not loaded yet");
  return scorer_.get();
}

grpc::ServerWriteReactor<v1::ScoreResponse>* ScorerService::Score(
    grpc::CallbackServerContext* context, const v1::ScoreRequest* request) {
  const absl::StatusOr<Scorer*> scorer = Available();
  const std::shared_ptr<ScoreCall> call =
      ScoreCall::Open(context, scorer.ok() ? *scorer : nullptr, options_.max_queued_bytes,
                      memory_->Open(gate_->ClientOf(*context)));
  absl::Status status = scorer.ok() ? Admit(*context, *request) : scorer.status();
  if (status.ok()) status = Submit(*request, call);
  if (!status.ok()) call->OnDone(status);
  DropContent(request);
  return call->reactor();
}

absl::Status ScorerService::Admit(const grpc::CallbackServerContext& context,
                                  const v1::ScoreRequest& request) {
  int64_t tokens = 0;
  for (const v1::ScoreSequence& sequence : request.sequences()) {
    tokens += sequence.prompt_token_ids_size() + sequence.completion_token_ids_size();
  }
  return gate_->Admit(context, {.requests = 1, .streams = 1, .tokens = tokens});
}

absl::Status ScorerService::Submit(const v1::ScoreRequest& request,
                                   const std::shared_ptr<ScoreCall>& call) {
  ISOBIT_ASSIGN_OR_RETURN(ScoreRequest parsed, ParseScoreRequest(request, limits_));
  std::vector<std::string> sequence_ids;
  for (const v1::ScoreSequence& sequence : request.sequences()) {
    sequence_ids.push_back(sequence.sequence_id());
  }
  return ScoreCall::Start(call, std::move(parsed), std::move(sequence_ids), fingerprint_);
}

grpc::ServerUnaryReactor* ScorerService::UpdateWeights(grpc::CallbackServerContext* context,
                                                       const v1::UpdateWeightsRequest* request,
                                                       v1::UpdateWeightsResponse* response) {
  const absl::StatusOr<Scorer*> scorer = Available();
  if (!scorer.ok()) return FinishAtOnce(context, scorer.status());
  absl::StatusOr<WeightUpdate> update = ParseUpdateWeightsRequest(*request);
  if (!update.ok()) return FinishAtOnce(context, update.status());
  const absl::Status admitted = gate_->Admit(*context, {.requests = 1});
  if (!admitted.ok()) return FinishAtOnce(context, admitted);

  const auto call = CancellableCall::Start([scorer = *scorer] { scorer->Wake(); });
  update->is_abandoned = [call] { return call->is_abandoned(); };
  const auto run = [context, response, call, scorer = *scorer, update = *std::move(update)] {
    const absl::StatusOr<WeightUpdateResult> result = scorer->UpdateWeights(update);
    if (result.ok()) *response = MakeUpdateWeightsResponse(*result);
    call->Finish(ToGrpcStatus(result.status(), *context));
  };
  const std::lock_guard lock(mutex_);
  updates_.erase(std::remove_if(updates_.begin(), updates_.end(),
                                [](const std::future<void>& done) {
                                  return done.wait_for(std::chrono::seconds(0)) ==
                                         std::future_status::ready;
                                }),
                 updates_.end());
  updates_.push_back(std::async(std::launch::async, run));
  return call.get();
}

grpc::ServerUnaryReactor* ScorerService::GetServerInfo(grpc::CallbackServerContext* context,
                                                       const v1::GetServerInfoRequest* /*request*/,
                                                       v1::ScorerServerInfo* info) {
  const std::lock_guard lock(mutex_);
  if (scorer_ == nullptr) {
    return FinishAtOnce(context, absl::UnavailableError("the weights are not loaded yet"));
  }
  *info = DescribeScorer(*scorer_, limits_);
  info->mutable_server()->set_uptime_seconds(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count());
  return FinishAtOnce(context, absl::OkStatus());
}

}  // namespace isobit::scorer
