// Field by field, with a refusal for each that asks for what is not served.
#include "rollout/service/vllm_messages.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "common/base/status_macros.h"
#include "common/rpc/limits.h"

namespace isobit {
namespace {

// INVALID_ARGUMENT, since another request would do. Behind a router UNIMPLEMENTED is a fault of the
// server, after which clients try again.
absl::Status NotServed(absl::string_view field, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": not served: ", why));
}

absl::Status RefuseUnknownFields(const google::protobuf::Message& message) {
  const auto& unknown = message.GetReflection()->GetUnknownFields(message);
  if (unknown.empty()) return absl::OkStatus();
  return NotServed(message.GetDescriptor()->full_name(),
                   absl::StrCat("field number ", unknown.field(0).number(), " is not known here"));
}

// What the request itself asks for and the service does not have.
absl::Status RefuseOfRequest(const vllm_wire::GenerateRequest& proto) {
  if (proto.has_text()) {
    return NotServed("text", "this service has no tokenizer; expected tokenized.input_ids");
  }
  if (proto.has_mm_inputs()) return NotServed("mm_inputs", "models are text models");
  if (proto.has_kv_transfer_params()) {
    return NotServed("kv_transfer_params", "prefill and decode are one service");
  }
  if (proto.has_kv_transfer_params_json()) {
    return NotServed("kv_transfer_params_json", "prefill and decode are one service");
  }
  if (proto.data_parallel_rank() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data_parallel_rank: expected 0, the only rank, got ", proto.data_parallel_rank()));
  }
  ISOBIT_RETURN_IF_ERROR(RefuseUnknownFields(proto));
  return RefuseUnknownFields(proto.tokenized());
}

absl::Status RefuseOfSampling(const vllm_wire::SamplingParams& proto) {
  if (!proto.stop().empty()) {
    return NotServed("sampling_params.stop",
                     "this service knows token ids alone; see stop_token_ids");
  }
  if (proto.constraint_case() != vllm_wire::SamplingParams::CONSTRAINT_NOT_SET) {
    const std::string& name =
        proto.GetDescriptor()->FindFieldByNumber(proto.constraint_case())->name();
    return NotServed(absl::StrCat("sampling_params.", name), "no structured outputs");
  }
  if (proto.has_prompt_logprobs()) {
    return NotServed("sampling_params.prompt_logprobs",
                     "isobit.v1.ScorerService.Score computes them");
  }
  if (proto.has_truncate_prompt_tokens()) {
    return NotServed("sampling_params.truncate_prompt_tokens", "send the ids that count");
  }
  return RefuseUnknownFields(proto);
}

// isobit.v1 takes these as unsigned numbers.
absl::Status CheckSigned(const vllm_wire::SamplingParams& proto) {
  if (proto.logprobs() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling_params.logprobs: expected 0 or more, got ", proto.logprobs()));
  }
  if (proto.seed() < -1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sampling_params.seed: expected -1, which is none, or more, got ", proto.seed()));
  }
  for (const auto& [id, bias] : proto.logit_bias()) {
    if (id >= 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("sampling_params.logit_bias key: expected a token id, got ", id));
  }
  return absl::OkStatus();
}

// The message of a whole sample has a bound, that of RolloutService's chunks is far below it.
absl::Status CheckFitsOneMessage(const v1::SamplingParams& sampling, bool logprobs) {
  constexpr uint64_t kId = 5, kLogprob = 4, kFrame = 10;  // at most; bytes on the wire
  const uint64_t alternatives = sampling.logprobs();
  uint64_t token = kId;
  if (logprobs) token += kId + kLogprob;
  if (alternatives > 0) token += kFrame + alternatives * (kId + kLogprob);
  const uint64_t bytes = token * sampling.max_tokens();
  if (bytes <= uint64_t{kMaxMessageBytes}) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("sampling_params: without stream, ", sampling.max_tokens(), " tokens with ",
                   alternatives, " alternatives may take ", bytes, " bytes, expected at most ",
                   kMaxMessageBytes, ", the size of one message"));
}

v1::SamplingParams ReadSampling(const vllm_wire::SamplingParams& proto, uint32_t room) {
  v1::SamplingParams sampling;
  if (proto.has_temperature()) sampling.set_temperature(proto.temperature());
  if (proto.top_p() != 0.0f) sampling.set_top_p(proto.top_p());
  // More than any vocabulary has: all.
  sampling.set_top_k(
      static_cast<int32_t>(std::min(proto.top_k(), uint32_t{std::numeric_limits<int32_t>::max()})));
  sampling.set_min_p(proto.min_p());
  sampling.set_frequency_penalty(proto.frequency_penalty());
  sampling.set_presence_penalty(proto.presence_penalty());
  if (proto.repetition_penalty() != 0.0f) {
    sampling.set_repetition_penalty(proto.repetition_penalty());
  }
  sampling.set_max_tokens(proto.has_max_tokens() ? proto.max_tokens() : room);
  sampling.set_min_tokens(proto.min_tokens());
  *sampling.mutable_stop_token_ids() = proto.stop_token_ids();
  sampling.set_ignore_eos(proto.ignore_eos());
  sampling.set_n(std::max(proto.n(), 1u));
  sampling.set_logprobs(static_cast<uint32_t>(proto.logprobs()));
  if (proto.has_seed() && proto.seed() >= 0) sampling.set_seed(static_cast<uint64_t>(proto.seed()));
  for (const auto& [id, bias] : proto.logit_bias()) {
    (*sampling.mutable_logit_bias())[static_cast<uint32_t>(id)] = bias;
  }
  return sampling;
}

// A large cache has more tokens than such a field can say.
int32_t Clamped(int64_t tokens) {
  return static_cast<int32_t>(std::min<int64_t>(tokens, std::numeric_limits<int32_t>::max()));
}

const char* FinishReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
      return "stop";
    case v1::FINISH_REASON_LENGTH:
      return "length";
    default:
      return "abort";
  }
}

}  // namespace

absl::StatusOr<v1::GenerateRequest> ReadVllmRequest(const vllm_wire::GenerateRequest& proto,
                                                    uint32_t context_length) {
  ISOBIT_RETURN_IF_ERROR(RefuseOfRequest(proto));
  ISOBIT_RETURN_IF_ERROR(RefuseOfSampling(proto.sampling_params()));
  ISOBIT_RETURN_IF_ERROR(CheckSigned(proto.sampling_params()));
  v1::GenerateRequest request;
  request.set_request_id(proto.request_id());
  *request.mutable_prompt_token_ids() = proto.tokenized().input_ids();
  request.set_final_only(!proto.stream());
  // A prompt without room is refused, as one that asks for a token too many.
  const auto prompt = static_cast<uint32_t>(proto.tokenized().input_ids_size());
  const uint32_t room = prompt < context_length ? context_length - prompt : 1;
  *request.mutable_sampling() = ReadSampling(proto.sampling_params(), room);
  if (!proto.stream()) {
    ISOBIT_RETURN_IF_ERROR(
        CheckFitsOneMessage(request.sampling(), proto.sampling_params().has_logprobs()));
  }
  return request;
}

absl::Status WithVllmNames(const absl::Status& status) {
  if (!absl::IsInvalidArgument(status)) return status;
  return absl::InvalidArgumentError(absl::StrReplaceAll(
      status.message(),
      {{"prompt_token_ids", "tokenized.input_ids"}, {"sampling.", "sampling_params."}}));
}

void AddTokens(const v1::TokenLogprobs& tokens, bool logprobs,
               vllm_wire::GenerateComplete& complete) {
  complete.mutable_output_ids()->MergeFrom(tokens.token_ids());
  complete.set_completion_tokens(static_cast<uint32_t>(complete.output_ids_size()));
  if (!logprobs) return;
  vllm_wire::OutputLogProbs& output = *complete.mutable_output_logprobs();
  output.mutable_token_logprobs()->MergeFrom(tokens.logprobs());
  output.mutable_token_ids()->MergeFrom(tokens.token_ids());
  for (const v1::TopLogprobs& top : tokens.top()) {
    vllm_wire::TopLogProbs& alternatives = *output.add_top_logprobs();
    *alternatives.mutable_values() = top.logprobs();
    *alternatives.mutable_token_ids() = top.token_ids();
  }
}

void SetEnd(const v1::GenerateComplete& end, vllm_wire::GenerateComplete& complete) {
  complete.set_index(end.index());
  complete.set_finish_reason(FinishReasonName(end.finish_reason()));
  complete.set_prompt_tokens(end.num_prompt_tokens());
  complete.set_cached_tokens(end.num_cached_tokens());
  if (end.has_stop_token_id()) complete.set_matched_token_id(end.stop_token_id());
}

vllm_wire::GetModelInfoResponse VllmModelInfo(const VllmModelNames& names,
                                              const ModelConfig& config, uint32_t context_length) {
  vllm_wire::GetModelInfoResponse info;
  info.set_model_path(names.directory);
  info.set_is_generation(true);
  info.set_max_context_length(context_length);
  info.set_vocab_size(static_cast<uint32_t>(config.vocab_size));
  info.set_served_model_name(names.served);
  info.set_tokenizer_path(names.tokenizer);
  info.set_model_type(ModelTypeName(config.architecture));
  info.add_architectures(ArchitectureName(config.architecture));
  info.mutable_eos_token_ids()->Add(config.eos_token_ids.begin(), config.eos_token_ids.end());
  info.set_bos_token_id(std::max(config.bos_token_id, 0));
  info.set_max_req_input_len(static_cast<int32_t>(context_length));
  return info;
}

vllm_wire::SchedulerLoad VllmLoad(const EngineLoad& load, const v1::RolloutServerInfo& info) {
  vllm_wire::SchedulerLoad proto;
  proto.set_num_running_reqs(static_cast<int32_t>(load.num_running_requests));
  proto.set_num_waiting_reqs(static_cast<int32_t>(load.num_waiting_requests));
  proto.set_num_total_reqs(
      static_cast<int32_t>(load.num_running_requests + load.num_waiting_requests));
  proto.set_num_used_tokens(Clamped(load.num_used_pages * int64_t{info.page_size()}));
  const int64_t pages = int64_t{load.num_used_pages} + load.num_free_pages;
  proto.set_max_total_num_tokens(Clamped(pages * int64_t{info.page_size()}));
  if (pages > 0) {
    proto.set_token_usage(static_cast<double>(load.num_used_pages) / static_cast<double>(pages));
  }
  if (load.prompts.all > 0) {
    proto.set_cache_hit_rate(static_cast<double>(load.prompts.cached) /
                             static_cast<double>(load.prompts.all));
  }
  proto.set_max_running_requests(static_cast<int32_t>(info.max_running_requests()));
  proto.set_num_waiting_uncached_tokens(Clamped(load.num_waiting_tokens));
  return proto;
}

}  // namespace isobit
