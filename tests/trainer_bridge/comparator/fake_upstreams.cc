// Fakes of the rollout and the scorer.
#include "tests/trainer_bridge/comparator/fake_upstreams.h"

#include "common/rpc/stream_writer.h"
#include "tests/support/status_matchers.h"

namespace isobit::testing_support {

float FakeLogprob(uint32_t position, uint32_t token) {
  return -0.001f * static_cast<float>((position * 7919 + token * 104729) % 5000) - 0.01f;
}

v1::ServerInfo FakeServerInfo() {
  v1::ServerInfo info;
  info.set_version("fake");
  info.mutable_fingerprint()->set_hex("f00d");
  info.mutable_fingerprint()->set_contract_version(1);
  info.mutable_weight_version()->set_id(1);
  info.mutable_weight_version()->set_digest("d1");
  info.mutable_model()->set_context_length(8192);
  return info;
}

grpc::ServerWriteReactor<v1::GenerateResponse>* FakeRollout::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  ++num_generates;
  const auto writer = StreamWriter<v1::GenerateResponse>::Start(
      context, {.on_cancel = [this] { ++num_cancelled; }});
  const uint32_t max_tokens = request->sampling().max_tokens();
  const uint32_t n = request->sampling().has_n() ? request->sampling().n() : 1;
  for (uint32_t position = 0; position < max_tokens; ++position) {
    for (uint32_t index = 0; index < n; ++index) {
      v1::GenerateResponse response;
      response.mutable_chunk()->set_index(index);
      v1::TokenLogprobs* tokens = response.mutable_chunk()->mutable_tokens();
      const uint32_t token = request->prompt_token_ids(0) + index + position;
      tokens->add_token_ids(token);
      float logprob = FakeLogprob(position, token);
      if (perturb) logprob = perturb(position, logprob);
      tokens->add_logprobs(logprob);
      tokens->add_weight_versions(token_weight_version);
      writer->Write(std::move(response));
      if (hang) return writer.get();
      if (!failure.ok()) {
        writer->Finish(failure);
        return writer.get();
      }
    }
  }
  for (uint32_t index = 0; index < n && !truncate; ++index) {
    v1::GenerateResponse response;
    v1::GenerateComplete* complete = response.mutable_complete();
    complete->set_index(index);
    complete->set_finish_reason(v1::FINISH_REASON_LENGTH);
    complete->set_logprob_mode(v1::LOGPROB_MODE_PROCESSED);
    *complete->mutable_fingerprint() = info.fingerprint();
    *complete->mutable_weight_version() = info.weight_version();
    writer->Write(std::move(response));
  }
  writer->Finish(absl::OkStatus());
  return writer.get();
}

grpc::ServerUnaryReactor* FakeRollout::GetServerInfo(grpc::CallbackServerContext* context,
                                                     const v1::GetServerInfoRequest*,
                                                     v1::RolloutServerInfo* response) {
  *response->mutable_server() = info;
  response->set_max_n(16);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerWriteReactor<v1::ScoreResponse>* FakeScorer::Score(grpc::CallbackServerContext* context,
                                                               const v1::ScoreRequest* request) {
  const bool is_first = ++num_scores == 1;
  const auto writer =
      StreamWriter<v1::ScoreResponse>::Start(context, {.on_cancel = [this] { ++num_cancelled; }});
  if (hang || (hang_first && is_first)) return writer.get();
  if (!failure.ok()) {
    writer->Finish(failure);
    return writer.get();
  }
  for (const v1::ScoreSequence& sequence : request->sequences()) {
    v1::ScoreResponse response;
    response.set_sequence_id(sequence.sequence_id());
    response.set_logprob_mode(v1::LOGPROB_MODE_PROCESSED);
    *response.mutable_fingerprint() = info.fingerprint();
    *response.mutable_weight_version() = info.weight_version();
    uint32_t position = 0;
    for (const uint32_t token : sequence.completion_token_ids()) {
      float logprob = FakeLogprob(position, token);
      if (perturb) logprob = perturb(sequence.sequence_id(), position, logprob);
      response.mutable_completion()->add_token_ids(token);
      response.mutable_completion()->add_logprobs(logprob);
      response.mutable_completion()->add_weight_versions(info.weight_version().id());
      ++position;
    }
    if (mutate) mutate(response);
    writer->Write(std::move(response));
  }
  if (!linger) writer->Finish(absl::OkStatus());
  return writer.get();
}

grpc::ServerUnaryReactor* FakeScorer::GetServerInfo(grpc::CallbackServerContext* context,
                                                    const v1::GetServerInfoRequest*,
                                                    v1::ScorerServerInfo* response) {
  *response->mutable_server() = info;
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

static ServerOptions OptionsWith(std::shared_ptr<CallGate> gate) {
  ServerOptions options;
  options.security.gate = std::move(gate);
  return options;
}

FakeServer::FakeServer(grpc::Service* service, const std::string& full_name,
                       std::shared_ptr<CallGate> gate)
    : runner_(OptionsWith(std::move(gate))) {
  runner_.Register(service, full_name);
  ISOBIT_EXPECT_OK(runner_.Start());
}

}  // namespace isobit::testing_support
