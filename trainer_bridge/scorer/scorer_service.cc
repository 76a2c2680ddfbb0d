// Handlers of the scorer's RPCs. See scorer_service.h.
#include "trainer_bridge/scorer/scorer_service.h"

#include <functional>
#include <utility>

#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/config/token_ids.h"
#include "common/rpc/probe_proto.h"
#include "common/rpc/unary_call.h"
#include "common/rpc/weight_stream.h"
#include "trainer_bridge/scorer/score_call.h"

namespace isobit {
ScorerService::ScorerService(const Options& options, std::shared_ptr<CallGate> gate,
                             std::shared_ptr<Metrics> metrics)
    : options_(options),
      memory_(std::make_shared<ByteBudget>("Score calls", options.memory)),
      gate_(std::move(gate)),
      registry_(std::move(metrics)),
      metrics_(*registry_, memory_) {}

ScorerService::~ScorerService() { Stop(); }

void ScorerService::Stop() {
  if (scorer_ != nullptr) scorer_->Stop();
  apart_.clear();  // waits for them
  observations_.clear();
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
  observations_ = ScorerMetrics::Observe(*registry_, *scorer_);
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
                      memory_->Open(gate_->ClientOf(*context)), metrics_.tokens);
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
  const absl::StatusOr<Scorer*> available = Available();
  if (!available.ok()) return Answer(context, available.status());
  Scorer* const scorer = *available;
  return AnswerLater(
      context, *gate_, ParseUpdateWeightsRequest(*request), [scorer] { scorer->Wake(); },
      [&](WeightUpdate update, const std::shared_ptr<UnaryCall>& call) {
        update.is_abandoned = [call] { return call->is_abandoned(); };
        Update(*scorer, std::move(update), response,
               [call](const absl::Status& status) { call->Answer(status); });
      });
}

grpc::ServerReadReactor<v1::WeightChunk>* ScorerService::UpdateWeightsFromStream(
    grpc::CallbackServerContext* context, v1::UpdateWeightsResponse* response) {
  const absl::StatusOr<Scorer*> available = Available();
  if (!available.ok()) return WeightStream::Refuse(context, *gate_, available.status());
  Scorer& scorer = **available;
  return WeightStream::Start(
      context, *gate_,
      {.plan = scorer.plan(),
       .policy = scorer.options().load_policy,
       .limits = options_.weight_stream,
       .parse = ParseUpdateWeightsRequest,
       .begin =
           [this, &scorer, response](WeightUpdate update,
                                     const std::shared_ptr<WeightStream>& call) {
             Update(scorer, std::move(update), response,
                    [call](const absl::Status& status) { call->Answer(status); });
           },
       .on_abandoned = [&scorer] { scorer.Wake(); }});
}

void ScorerService::Update(Scorer& scorer, WeightUpdate update, v1::UpdateWeightsResponse* response,
                           std::function<void(const absl::Status&)> answer) {
  RunApart(
      [this, &scorer, update = std::move(update), response, answer = std::move(answer)]() mutable {
        // The future keeps this function until the next update. What a stream has left must not
        // wait so long.
        const WeightUpdate running = std::move(update);
        const auto reply = std::exchange(answer, nullptr);
        const absl::StatusOr<WeightUpdateResult> result = scorer.UpdateWeights(running);
        if (result.ok()) {
          *response = MakeUpdateWeightsResponse(*result);
          metrics_.update_seconds.Observe(
              std::chrono::duration<double>(result->prepare_time + result->switch_time).count());
        }
        reply(result.status());
      });
}

void ScorerService::RunApart(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  std::erase_if(apart_, [](const std::future<void>& done) {
    return done.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  });
  apart_.push_back(std::async(std::launch::async, std::move(work)));
}

grpc::ServerUnaryReactor* ScorerService::Probe(grpc::CallbackServerContext* context,
                                               const v1::ProbeRequest* request,
                                               v1::ProbeResponse* response) {
  const absl::StatusOr<Scorer*> available = Available();
  if (!available.ok()) return Answer(context, available.status());
  return AnswerLater(
      context, *gate_, ReadProbe<ProbeWanted>(*request), nullptr,
      [&](const ProbeWanted& wanted, const std::shared_ptr<UnaryCall>& call) {
        RunApart([this, &scorer = **available, tokens = TokenIdsFromWire(request->token_ids()),
                  wanted, with_tensors = request->tensor_digests(), response, call] {
          const absl::StatusOr<ProbeResult> result = scorer.Probe(tokens, wanted);
          if (result.ok()) {
            WriteProbe(*result, with_tensors, *response);
            *response->mutable_fingerprint() = fingerprint_;
          }
          call->Answer(result.status());
        });
      });
}

grpc::ServerUnaryReactor* ScorerService::GetServerInfo(grpc::CallbackServerContext* context,
                                                       const v1::GetServerInfoRequest* /*request*/,
                                                       v1::ScorerServerInfo* info) {
  const std::lock_guard lock(mutex_);
  if (scorer_ == nullptr) {
    return Answer(context, absl::UnavailableError("the weights are not loaded yet"));
  }
  *info = DescribeScorer(*scorer_, limits_);
  info->mutable_server()->set_uptime_seconds(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count());
  return Answer(context, absl::OkStatus());
}

}  // namespace isobit
