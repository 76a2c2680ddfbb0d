// Maps calls to the engine. See rollout_service.h.
#include "rollout/service/rollout_service.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/access/held_bytes.h"
#include "common/base/status_macros.h"
#include "common/config/token_ids.h"
#include "common/rpc/probe_proto.h"
#include "common/rpc/server_info.h"
#include "common/rpc/unary_call.h"
#include "common/rpc/weight_stream.h"
#include "kernels/contract/constants.h"
#include "kernels/model/numerics.h"
#include "rollout/service/generate_stream.h"
#include "rollout/service/rollout_messages.h"

namespace isobit {
namespace {

v1::RolloutServerInfo DescribeRollout(const Engine& engine) {
  const EngineOptions& options = engine.options();
  const RequestLimits& limits = engine.limits();
  v1::RolloutServerInfo info;
  *info.mutable_server() = DescribeServer(
      engine.plan(), {.mode = options.runner.mode,
                      .fingerprint = FingerprintOf(engine.config(), options.runner.mode),
                      .contract_version = contract::kContractVersion,
                      .instruction_set = engine.backend(),
                      .max_logprobs = options.sampling.max_logprobs,
                      .context_length = std::min(
                          {limits.context_length, limits.max_batch_tokens, limits.kv_tokens})});
  info.set_tensor_parallel_size(static_cast<uint32_t>(options.runner.tensor_parallel_size));
  info.set_page_size(static_cast<uint32_t>(options.runner.page_size));
  info.set_num_pages(static_cast<uint32_t>(options.runner.num_pages));
  info.set_max_running_requests(static_cast<uint32_t>(options.scheduler.max_running));
  info.set_max_waiting_requests(static_cast<uint32_t>(options.max_waiting_requests));
  info.set_max_n(options.sampling.max_n);
  info.set_prefix_sharing(options.scheduler.share_prefixes);
  if (engine.guesser() != nullptr) {
    const GuesserInfo guesser = engine.guesser()->info();
    for (const auto& [name, counts] : guesser.drafters) info.add_drafters(name);
    info.set_verify_window(static_cast<uint32_t>(guesser.verify_window));
    info.set_verify_group(static_cast<uint32_t>(guesser.verify_group));
  }
  return info;
}

v1::Fingerprint ProvisionalFingerprint(const Engine& engine) {
  return FingerprintToProto(engine.config(), FingerprintOf(engine.config(), kVariantMode),
                            contract::kContractVersion);
}

using Stream = StreamWriter<v1::GenerateResponse>;

// Writes the messages as they are.
class PlainWriter final : public GenerateWriter {
 public:
  explicit PlainWriter(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}

  WriteResult Write(v1::GenerateResponse message) override {
    return stream_->Write(std::move(message));
  }
  void Finish(absl::Status status) override { stream_->Finish(std::move(status)); }
  bool closed() const override { return stream_->closed(); }
  // A message in flight is in memory twice: as an object, and serialised.
  size_t held_bytes() const override { return 2 * stream_->queued_bytes(); }

 private:
  const std::shared_ptr<Stream> stream_;
};

}  // namespace

RolloutService::RolloutService(Engine& engine, const StreamLimits& limits,
                               std::shared_ptr<CallGate> gate, std::shared_ptr<Metrics> metrics,
                               const WeightStreamLimits& weight_stream,
                               const WeightTransferOptions& transfer)
    : engine_(engine),
      weight_stream_(weight_stream),
      memory_(limits),
      gate_(std::move(gate)),
      registry_(std::move(metrics)),
      metrics_(*registry_, engine, memory_),
      tap_(*registry_),
      info_(DescribeRollout(engine)),
      provisional_(ProvisionalFingerprint(engine)),
      transfer_({.plan = engine.plan(),
                 .policy = engine.options().load_policy,
                 .limits = weight_stream,
                 .begin =
                     [this](WeightUpdate update, v1::UpdateWeightsResponse* response,
                            std::function<void(const absl::Status&)> answer) {
                       Update(std::move(update), response, std::move(answer));
                     },
                 .wake = [this] { engine_.Wake(); }},
                transfer) {}

std::string RolloutService::NewRequestId() { return absl::StrCat("rollout-", ++num_ids_); }

absl::Status RolloutService::Admit(const grpc::CallbackServerContext& context,
                                   const v1::GenerateRequest& request) const {
  const v1::SamplingParams& sampling = request.sampling();
  // A value out of bounds counts as the bound. The engine refuses it.
  const int64_t samples = std::min(sampling.has_n() ? sampling.n() : 1, info_.max_n());
  const int64_t length =
      std::min(sampling.has_max_tokens() ? sampling.max_tokens() : SamplingParams().max_tokens,
               info_.server().model().context_length());
  return gate_->Admit(context, {.requests = 1,
                                .streams = 1,
                                .tokens = request.prompt_token_ids_size() +
                                          request.draft_token_ids_size() + samples * length});
}

grpc::ServerWriteReactor<v1::GenerateResponse>* RolloutService::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  grpc::ServerWriteReactor<v1::GenerateResponse>* reactor = nullptr;
  Begin(*context, *request, [&](const WriterEvents& events) {
    auto stream = Stream::Start(context, OneAtATime<v1::GenerateResponse>(events));
    reactor = stream.get();
    return std::make_shared<PlainWriter>(std::move(stream));
  });
  return reactor;
}

void RolloutService::Begin(const grpc::CallbackServerContext& context,
                           const v1::GenerateRequest& request, OpenGenerateWriter open) {
  GenerationRequest generation;
  generation.id = request.request_id().empty() ? NewRequestId() : request.request_id();
  generation.client = gate_->ClientOf(context);
  absl::Status status = Admit(context, request);
  if (status.ok()) status = ReadGenerateRequest(request, generation);
  const ChunkPacing pacing{.final_only = request.final_only(),
                           .interval = std::chrono::milliseconds(request.chunk_interval_ms())};
  std::unique_ptr<TappedRequest> tapped;
  const bool is_exact = generation.deterministic || info_.verify_window() == 0;
  // The engine refuses a larger n.
  if (status.ok() && tap_.is_open() && is_exact && request.sampling().n() <= info_.max_n()) {
    tapped = std::make_unique<TappedRequest>(tap_, generation.id, request);
  }
  DropContent(&request);
  const auto stream = std::make_shared<GenerateStream>(
      engine_, is_exact ? info_.server().fingerprint() : provisional_, memory_, generation.client,
      metrics_.generation, pacing);
  stream->Start(open, std::move(generation), status, std::move(tapped));
}

grpc::ServerUnaryReactor* RolloutService::Probe(grpc::CallbackServerContext* context,
                                                const v1::ProbeRequest* request,
                                                v1::ProbeResponse* response) {
  return AnswerLater(
      context, *gate_, ReadProbe<ProbeWanted>(*request), [this] { engine_.Wake(); },
      [&](const ProbeWanted& wanted, const std::shared_ptr<UnaryCall>& call) {
        engine_.Probe(
            TokenIdsFromWire(request->token_ids()), wanted,
            [this, call, response,
             tensors = request->tensor_digests()](const absl::StatusOr<ProbeResult>& result) {
              if (result.ok()) {
                WriteProbe(*result, tensors, *response);
                *response->mutable_fingerprint() = info_.server().fingerprint();
              }
              call->Answer(result.status());
            },
            [call] { return call->is_abandoned(); });
      });
}

grpc::ServerWriteReactor<v1::TappedSample>* RolloutService::Tap(
    grpc::CallbackServerContext* context, const v1::TapRequest* request) {
  if (const absl::Status status = gate_->Admit(*context, {.requests = 1, .streams = 1});
      !status.ok()) {
    const auto writer = StreamWriter<v1::TappedSample>::Start(context);
    writer->Finish(status);
    return writer.get();
  }
  return tap_.Open(context, *request);
}

grpc::ServerUnaryReactor* RolloutService::Abort(grpc::CallbackServerContext* context,
                                                const v1::AbortRequest* request,
                                                v1::AbortResponse* response) {
  if (request->all() && request->request_ids_size() > 0) {
    return Answer(context, absl::InvalidArgumentError(
                               absl::StrCat("request_ids: expected none together with all, got ",
                                            request->request_ids_size())));
  }
  const std::vector<std::string> ids(request->request_ids().begin(), request->request_ids().end());
  const auto ended = request->all() ? EndAllRequests(*context) : EndRequests(*context, ids);
  if (!ended.ok()) return Answer(context, ended.status());
  for (const std::string& id : *ended) response->add_request_ids(id);
  return Answer(context, absl::OkStatus());
}

absl::StatusOr<std::vector<std::string>> RolloutService::EndAllRequests(
    const grpc::CallbackServerContext& context) {
  ISOBIT_RETURN_IF_ERROR(gate_->Recheck(context));
  ISOBIT_RETURN_IF_ERROR(gate_->CheckAdmin(context));
  return engine_.AbortAll();
}

absl::StatusOr<std::vector<std::string>> RolloutService::EndRequests(
    const grpc::CallbackServerContext& context, absl::Span<const std::string> ids) {
  ISOBIT_RETURN_IF_ERROR(gate_->Recheck(context));
  std::optional<std::string> owner;  // the client whose requests may be ended; unset: all clients
  if (!gate_->CheckAdmin(context).ok()) owner = gate_->ClientOf(context);
  return engine_.Abort(ids, owner);
}

grpc::ServerUnaryReactor* RolloutService::PauseGeneration(grpc::CallbackServerContext* context,
                                                          const v1::PauseGenerationRequest* request,
                                                          v1::PauseGenerationResponse* response) {
  return AnswerLater(
      context, *gate_, PauseModeFromProto(request->mode()), [this] { engine_.Wake(); },
      [&](PauseMode mode, const std::shared_ptr<UnaryCall>& call) {
        engine_.Pause(
            mode,
            [call, response](const absl::StatusOr<PauseResult>& result) {
              if (result.ok()) *response = PauseResponse(*result);
              call->Answer(result.status());
            },
            [call] { return call->is_abandoned(); });
      });
}

grpc::ServerUnaryReactor* RolloutService::ContinueGeneration(
    grpc::CallbackServerContext* context, const v1::ContinueGenerationRequest* /*request*/,
    v1::ContinueGenerationResponse* response) {
  if (const absl::Status allowed = gate_->Recheck(*context); !allowed.ok()) {
    return Answer(context, allowed);
  }
  const absl::StatusOr<size_t> resumed = engine_.Continue();
  if (resumed.ok()) response->set_num_resumed(static_cast<uint32_t>(*resumed));
  return Answer(context, resumed.status());
}

grpc::ServerUnaryReactor* RolloutService::Sleep(grpc::CallbackServerContext* context,
                                                const v1::SleepRequest* request,
                                                v1::SleepResponse* response) {
  return AnswerLater(
      context, *gate_, ReadSleepRequest(*request), [this] { engine_.Wake(); },
      [&](const SleepCall& sleep, const std::shared_ptr<UnaryCall>& call) {
        engine_.Sleep(
            sleep.level, sleep.mode,
            [call, response](const absl::StatusOr<SleepResult>& result) {
              if (result.ok()) *response = SleepResponse(*result);
              call->Answer(result.status());
            },
            [call] { return call->is_abandoned(); });
      });
}

grpc::ServerUnaryReactor* RolloutService::WakeUp(grpc::CallbackServerContext* context,
                                                 const v1::WakeUpRequest* request,
                                                 v1::WakeUpResponse* response) {
  return AnswerLater(
      context, *gate_, absl::StatusOr<v1::WakeUpRequest>(*request), [this] { engine_.Wake(); },
      [&](const v1::WakeUpRequest&, const std::shared_ptr<UnaryCall>& call) {
        engine_.WakeUp(
            [call, response](const absl::StatusOr<size_t>& resumed) {
              if (resumed.ok()) response->set_num_resumed(static_cast<uint32_t>(*resumed));
              call->Answer(resumed.status());
            },
            [call] { return call->is_abandoned(); });
      });
}

grpc::ServerUnaryReactor* RolloutService::UpdateWeights(grpc::CallbackServerContext* context,
                                                        const v1::UpdateWeightsRequest* request,
                                                        v1::UpdateWeightsResponse* response) {
  return AnswerLater(
      context, *gate_, ReadUpdateWeightsRequest(*request), [this] { engine_.Wake(); },
      [&](WeightUpdate update, const std::shared_ptr<UnaryCall>& call) {
        update.is_abandoned = [call] { return call->is_abandoned(); };
        Update(std::move(update), response,
               [call](const absl::Status& status) { call->Answer(status); });
      });
}

grpc::ServerReadReactor<v1::WeightChunk>* RolloutService::UpdateWeightsFromStream(
    grpc::CallbackServerContext* context, v1::UpdateWeightsResponse* response) {
  return WeightStream::Start(
      context, *gate_,
      {.plan = engine_.plan(),
       .policy = engine_.options().load_policy,
       .limits = weight_stream_,
       .parse = ReadUpdateWeightsRequest,
       .begin =
           [this, response](WeightUpdate update, const std::shared_ptr<WeightStream>& call) {
             Update(std::move(update), response,
                    [call](const absl::Status& status) { call->Answer(status); });
           },
       .on_abandoned = [this] { engine_.Wake(); }});
}

void RolloutService::Update(WeightUpdate update, v1::UpdateWeightsResponse* response,
                            std::function<void(const absl::Status&)> answer) {
  engine_.UpdateWeights(
      std::move(update), [response, &metrics = metrics_, answer = std::move(answer)](
                             const absl::StatusOr<WeightUpdateResult>& result) {
        if (result.ok()) {
          *response = UpdateWeightsResponse(*result);
          metrics.update_seconds.Observe(
              std::chrono::duration<double>(result->prepare_time + result->switch_time).count());
        }
        answer(result.status());
      });
}

grpc::ServerUnaryReactor* RolloutService::GetServerInfo(grpc::CallbackServerContext* context,
                                                        const v1::GetServerInfoRequest* /*request*/,
                                                        v1::RolloutServerInfo* response) {
  *response = info_;
  const RankMemory memory = engine_.memory();
  response->set_weight_bytes(memory.weights);
  response->set_kv_cache_bytes(memory.kv_cache);
  response->set_activation_bytes(memory.activations);
  const auto uptime = std::chrono::steady_clock::now() - start_;
  response->mutable_server()->set_uptime_seconds(std::chrono::duration<double>(uptime).count());
  if (const auto version = engine_.weight_version()) {
    *response->mutable_server()->mutable_weight_version() = WeightVersionToProto(*version);
  }
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* RolloutService::GetLoad(grpc::CallbackServerContext* context,
                                                  const v1::GetLoadRequest* /*request*/,
                                                  v1::GetLoadResponse* response) {
  const EngineLoad load = engine_.load();
  response->set_num_running_requests(static_cast<uint32_t>(load.num_running_requests));
  response->set_num_waiting_requests(static_cast<uint32_t>(load.num_waiting_requests));
  response->set_num_queued_tokens(static_cast<uint64_t>(load.num_waiting_tokens));
  response->set_num_used_pages(static_cast<uint32_t>(load.num_used_pages));
  response->set_num_free_pages(static_cast<uint32_t>(load.num_free_pages));
  response->set_paused(load.paused);
  response->set_asleep(load.asleep);
  response->set_num_cached_pages(static_cast<uint32_t>(load.num_cached_pages));
  response->set_num_prompt_tokens(static_cast<uint64_t>(load.prompts.all));
  response->set_num_cached_prompt_tokens(static_cast<uint64_t>(load.prompts.cached));
  return Answer(context, absl::OkStatus());
}

}  // namespace isobit
