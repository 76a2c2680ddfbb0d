// Maps VllmEngine's calls to RolloutService. See vllm_service.h.
#include "rollout/service/vllm_service.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/access/held_bytes.h"
#include "common/rpc/stream_writer.h"
#include "common/rpc/unary_call.h"
#include "rollout/service/vllm_writer.h"

namespace isobit {
namespace {

grpc::ServerWriteReactor<vllm_wire::NotServed>* Refuse(grpc::CallbackServerContext* context,
                                                       const char* why) {
  const auto stream = StreamWriter<vllm_wire::NotServed>::Start(context);
  stream->Finish(absl::UnimplementedError(why));
  return stream.get();
}

}  // namespace

VllmService::VllmService(RolloutService& rollout, const Engine& engine, const VllmModelNames& names,
                         std::function<bool()> is_serving)
    : rollout_(rollout),
      engine_(engine),
      is_serving_(std::move(is_serving)),
      model_(VllmModelInfo(names, engine.config(),
                           rollout.info().server().model().context_length())) {}

grpc::ServerWriteReactor<vllm_wire::GenerateResponse>* VllmService::Generate(
    grpc::CallbackServerContext* context, const vllm_wire::GenerateRequest* request) {
  last_received_us_ = absl::GetCurrentTimeNanos() / 1000;
  const VllmAnswers answers = {
      .stream = request->stream(),
      .logprobs = request->sampling_params().has_logprobs(),
      .num_prompt_tokens = static_cast<uint32_t>(request->tokenized().input_ids_size())};
  absl::StatusOr<v1::GenerateRequest> generate =
      ReadVllmRequest(*request, model_.max_context_length());
  DropContent(request);
  if (!generate.ok()) {
    const auto stream = VllmWriter::Stream::Start(context);
    stream->Finish(generate.status());
    return stream.get();
  }
  grpc::ServerWriteReactor<vllm_wire::GenerateResponse>* reactor = nullptr;
  rollout_.Begin(*context, *generate, [&](const WriterEvents& events) {
    auto stream =
        VllmWriter::Stream::Start(context, OneAtATime<vllm_wire::GenerateResponse>(events));
    reactor = stream.get();
    return std::make_shared<VllmWriter>(std::move(stream), answers);
  });
  return reactor;
}

grpc::ServerUnaryReactor* VllmService::Abort(grpc::CallbackServerContext* context,
                                             const vllm_wire::AbortRequest* request,
                                             vllm_wire::AbortResponse* /*response*/) {
  const std::vector<std::string> ids(request->request_ids().begin(), request->request_ids().end());
  return Answer(context, rollout_.EndRequests(*context, ids).status());
}

grpc::ServerUnaryReactor* VllmService::HealthCheck(grpc::CallbackServerContext* context,
                                                   const vllm_wire::HealthCheckRequest* /*request*/,
                                                   vllm_wire::HealthCheckResponse* response) {
  response->set_healthy(is_serving_());
  response->set_message(response->healthy() ? "serving" : "not serving: loading or draining");
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* VllmService::GetModelInfo(
    grpc::CallbackServerContext* context, const vllm_wire::GetModelInfoRequest* /*request*/,
    vllm_wire::GetModelInfoResponse* response) {
  *response = model_;
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* VllmService::GetServerInfo(
    grpc::CallbackServerContext* context, const vllm_wire::GetServerInfoRequest* /*request*/,
    vllm_wire::GetServerInfoResponse* response) {
  const EngineLoad load = engine_.load();
  response->set_active_requests(
      static_cast<uint32_t>(load.num_running_requests + load.num_waiting_requests));
  response->set_is_paused(load.paused || load.asleep);
  response->set_last_receive_timestamp(static_cast<double>(last_received_us_) / 1e6);
  const auto uptime = std::chrono::steady_clock::now() - start_;
  response->set_uptime_seconds(std::chrono::duration<double>(uptime).count());
  response->set_server_type("isobit");
  response->set_data_parallel_size(1);
  response->set_max_num_seqs(static_cast<int32_t>(rollout_.info().max_running_requests()));
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* VllmService::GetLoads(grpc::CallbackServerContext* context,
                                                const vllm_wire::GetLoadsRequest* request,
                                                vllm_wire::GetLoadsResponse* response) {
  response->set_timestamp(absl::FormatTime(absl::RFC3339_full, absl::Now(), absl::UTCTimeZone()));
  response->set_version(rollout_.info().server().version());
  response->set_dp_rank_count(1);
  if (request->dp_rank() == 0) *response->add_loads() = VllmLoad(engine_.load(), rollout_.info());
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* VllmService::Embed(grpc::CallbackServerContext* context,
                                             const vllm_wire::NotServed* /*request*/,
                                             vllm_wire::NotServed* /*response*/) {
  return Answer(context, absl::UnimplementedError("Embed: models generate, they do not embed"));
}

grpc::ServerWriteReactor<vllm_wire::NotServed>* VllmService::GetTokenizer(
    grpc::CallbackServerContext* context, const vllm_wire::NotServed* /*request*/) {
  return Refuse(context,
                "GetTokenizer: this service has no tokenizer; GetModelInfo says where one may be");
}

grpc::ServerWriteReactor<vllm_wire::NotServed>* VllmService::SubscribeKvEvents(
    grpc::CallbackServerContext* context, const vllm_wire::NotServed* /*request*/) {
  return Refuse(context, "SubscribeKvEvents: this service publishes no events of its KV pages");
}

}  // namespace isobit
