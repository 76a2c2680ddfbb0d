// Reads requests, with every bound checked, and writes responses. See score_messages.h.
#include "trainer_bridge/scorer/score_messages.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/status_macros.h"
#include "common/config/token_ids.h"
#include "common/rpc/limits.h"
#include "common/rpc/sampling_params_proto.h"
#include "common/rpc/server_info.h"
#include "kernels/contract/constants.h"
#include "kernels/model/numerics.h"

namespace isobit {
namespace {

template <class T>
absl::Status Bad(absl::string_view field, absl::string_view expected, const T& got) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": expected ", expected, ", got ", got));
}

absl::StatusOr<std::vector<int32_t>> ParseIds(const google::protobuf::RepeatedField<uint32_t>& wire,
                                              absl::string_view field, int32_t vocab_size) {
  std::vector<int32_t> ids = TokenIdsFromWire(wire);
  ISOBIT_RETURN_IF_ERROR(CheckTokenIds(field, ids, vocab_size));
  return ids;
}

absl::StatusOr<ScoreInput> ParseSequence(const v1::ScoreSequence& sequence,
                                         const std::string& field, bool prompt_logprobs,
                                         const ScoreLimits& limits) {
  ScoreInput input;
  ISOBIT_ASSIGN_OR_RETURN(
      input.prompt, ParseIds(sequence.prompt_token_ids(), absl::StrCat(field, ".prompt_token_ids"),
                             limits.vocab_size));
  ISOBIT_ASSIGN_OR_RETURN(
      input.completion, ParseIds(sequence.completion_token_ids(),
                                 absl::StrCat(field, ".completion_token_ids"), limits.vocab_size));
  if (input.prompt.empty()) {
    return Bad(absl::StrCat(field, ".prompt_token_ids"), "at least one token", "none");
  }
  if (input.completion.empty() && !prompt_logprobs) {
    return Bad(absl::StrCat(field, ".completion_token_ids"),
               "at least one token unless prompt_logprobs is set", "none");
  }
  if (input.num_tokens() > limits.max_context) {
    return Bad(absl::StrCat(field, ", prompt and completion"),
               absl::StrCat("at most ", limits.max_context, " tokens"), input.num_tokens());
  }
  return input;
}

// A result must fit into one message; the request determines its size.
absl::Status CheckResponseSize(const ScoreRequest& request) {
  constexpr uint64_t kTokenBytes = 32;        // id, logprob, version, entropy
  constexpr uint64_t kAlternativeBytes = 10;  // id, logprob
  const uint64_t bytes = kTokenBytes + kAlternativeBytes * request.options.sampling.logprobs;
  for (size_t s = 0; s < request.inputs.size(); ++s) {
    const auto tokens = static_cast<uint64_t>(request.inputs[s].num_tokens());
    if (tokens * bytes > static_cast<uint64_t>(kMaxMessageBytes)) {
      return Bad(
          absl::StrCat("sampling.logprobs, with the ", tokens, " tokens of sequences[", s, "]"),
          absl::StrCat("a response of at most ", kMaxMessageBytes, " bytes"),
          absl::StrCat("one of up to ", tokens * bytes));
    }
  }
  return absl::OkStatus();
}

v1::TokenLogprobs MakeTokenLogprobs(absl::Span<const int32_t> ids, const TokenScores& scores,
                                    uint64_t version) {
  v1::TokenLogprobs message;
  const size_t width = ids.empty() ? 0 : scores.top.size() / ids.size();
  for (size_t i = 0; i < ids.size(); ++i) {
    message.add_token_ids(static_cast<uint32_t>(ids[i]));
    message.add_logprobs(scores.logprobs[i]);
    message.add_weight_versions(version);
    if (width == 0) continue;
    v1::TopLogprobs& top = *message.add_top();
    for (const TokenLogProb& one : absl::MakeSpan(scores.top).subspan(i * width, width)) {
      if (one.id < 0) break;
      top.add_token_ids(static_cast<uint32_t>(one.id));
      top.add_logprobs(one.logprob);
    }
  }
  return message;
}

}  // namespace

absl::StatusOr<ScoreRequest> ParseScoreRequest(const v1::ScoreRequest& request,
                                               const ScoreLimits& limits) {
  const int count = request.sequences_size();
  if (count < 1 || static_cast<size_t>(count) > limits.max_sequences) {
    return Bad("number of sequences", absl::StrCat("1 to ", limits.max_sequences), count);
  }
  ScoreRequest parsed;
  ScoreOptions& options = parsed.options;
  options.prompt_logprobs = request.prompt_logprobs();
  options.entropy = request.entropy();
  if (request.has_weight_version()) options.weight_version = request.weight_version();
  switch (request.logprob_mode()) {
    case v1::LOGPROB_MODE_UNSPECIFIED:
    case v1::LOGPROB_MODE_PROCESSED:
      break;
    case v1::LOGPROB_MODE_RAW:
      options.raw = true;
      break;
    default:
      return Bad("logprob_mode", "PROCESSED or RAW", static_cast<int>(request.logprob_mode()));
  }
  options.sampling = SamplingParamsFromProto(request.sampling());
  options.sampling.n = 1;
  options.sampling.max_tokens = std::numeric_limits<uint32_t>::max();
  SamplingLimits sampling_limits;
  sampling_limits.vocab_size = limits.vocab_size;
  sampling_limits.max_logprobs = limits.max_logprobs;
  ISOBIT_RETURN_IF_ERROR(ValidateSamplingParams(options.sampling, sampling_limits));

  for (int s = 0; s < count; ++s) {
    ISOBIT_ASSIGN_OR_RETURN(ScoreInput input,
                            ParseSequence(request.sequences(s), absl::StrCat("sequences[", s, "]"),
                                          options.prompt_logprobs, limits));
    parsed.inputs.push_back(std::move(input));
  }
  ISOBIT_RETURN_IF_ERROR(CheckResponseSize(parsed));
  return parsed;
}

size_t BytesOf(const ScoreRequest& request, int64_t max_unread_tokens) {
  // A result is in memory as scores and as a message, and arrays may be half empty.
  constexpr size_t kResultBytes = 1024;
  constexpr size_t kTokenBytes = 40;
  constexpr size_t kRowBytes = 128;  // a token's list of alternatives; below, each of them
  constexpr size_t kAlternativeBytes = 24;
  const SamplingParams& sampling = request.options.sampling;
  size_t bytes = sampling.stop_token_ids.capacity() * sizeof(int32_t) +
                 sampling.logit_bias.capacity() * sizeof(sampling.logit_bias[0]);
  int64_t results = 0;
  for (const ScoreInput& input : request.inputs) {
    bytes += sizeof(ScoreInput) + kResultBytes +
             static_cast<size_t>(input.num_tokens()) * sizeof(int32_t);
    results += request.options.prompt_logprobs ? input.num_tokens()
                                               : static_cast<int64_t>(input.completion.size());
  }
  const size_t token =
      kTokenBytes + (sampling.logprobs > 0 ? kRowBytes + kAlternativeBytes * sampling.logprobs : 0);
  return bytes + static_cast<size_t>(std::min(results, max_unread_tokens)) * token;
}

v1::ScoreResponse MakeScoreResponse(const ScoreInput& input, const ScoreOptions& options,
                                    const SequenceScore& score,
                                    const v1::Fingerprint& fingerprint) {
  v1::ScoreResponse response;
  response.set_index(static_cast<uint32_t>(score.index));
  *response.mutable_completion() =
      MakeTokenLogprobs(input.completion, score.completion, score.version.id);
  if (options.prompt_logprobs) {
    *response.mutable_prompt() = MakeTokenLogprobs(absl::MakeConstSpan(input.prompt).subspan(1),
                                                   score.prompt, score.version.id);
  }
  response.mutable_entropies()->Add(score.completion.entropies.begin(),
                                    score.completion.entropies.end());
  response.set_logprob_mode(options.raw ? v1::LOGPROB_MODE_RAW : v1::LOGPROB_MODE_PROCESSED);
  *response.mutable_fingerprint() = fingerprint;
  *response.mutable_weight_version() = WeightVersionToProto(score.version);
  return response;
}

absl::StatusOr<WeightUpdate> ParseUpdateWeightsRequest(const v1::UpdateWeightsRequest& request) {
  WeightUpdate update;
  update.mode = InFlightMode::kWait;
  update.model_path = request.model_path();
  if (request.has_weight_version()) update.weight_version = request.weight_version();
  update.expected_digest = request.expected_digest();
  switch (request.in_flight_mode()) {
    case v1::IN_FLIGHT_MODE_UNSPECIFIED:
    case v1::IN_FLIGHT_MODE_WAIT:
      return update;
    case v1::IN_FLIGHT_MODE_ABORT:
      update.mode = InFlightMode::kAbort;
      return update;
    case v1::IN_FLIGHT_MODE_RECOMPUTE_KV:
      return Bad("in_flight_mode", "WAIT or ABORT, as a scorer has no KV cache", "RECOMPUTE_KV");
    default:
      return Bad("in_flight_mode", "WAIT or ABORT", static_cast<int>(request.in_flight_mode()));
  }
}

v1::UpdateWeightsResponse MakeUpdateWeightsResponse(const WeightUpdateResult& result) {
  v1::UpdateWeightsResponse response;
  *response.mutable_previous() = WeightVersionToProto(result.previous);
  *response.mutable_current() = WeightVersionToProto(result.current);
  response.set_num_aborted(static_cast<uint32_t>(result.num_aborted));
  response.set_stage_micros(static_cast<uint64_t>(result.prepare_time.count()));
  response.set_switch_micros(static_cast<uint64_t>(result.switch_time.count()));
  return response;
}

v1::Fingerprint FingerprintOf(const Scorer& scorer) {
  return FingerprintToProto(scorer.config(),
                            isobit::FingerprintOf(scorer.config(), scorer.options().numerics),
                            contract::kContractVersion);
}

v1::ScorerServerInfo DescribeScorer(const Scorer& scorer, const ScoreLimits& limits) {
  v1::ScorerServerInfo info;
  v1::ServerInfo& server = *info.mutable_server();
  server = DescribeServer(scorer.plan(), {.mode = scorer.options().numerics,
                                          .fingerprint = FingerprintOf(scorer).hex(),
                                          .contract_version = contract::kContractVersion,
                                          .instruction_set = scorer.ops_name(),
                                          .max_logprobs = limits.max_logprobs,
                                          .context_length = scorer.options().max_context});
  *server.mutable_weight_version() = WeightVersionToProto(scorer.version());
  info.set_num_shards(static_cast<uint32_t>(scorer.options().num_shards));
  info.set_shard_bytes(scorer.shard_bytes());
  info.set_layer_bytes(scorer.largest_block_bytes());
  info.set_resident_full_layers(static_cast<uint32_t>(scorer.resident_blocks()));
  info.set_peak_full_layers(static_cast<uint32_t>(scorer.peak_blocks()));
  info.set_max_sequences(static_cast<uint32_t>(limits.max_sequences));
  info.set_max_batch_tokens(static_cast<uint32_t>(scorer.options().max_batch_tokens));
  return info;
}

}  // namespace isobit
