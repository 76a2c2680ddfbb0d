// Reads sampling parameters off the wire, and writes them.
#include "common/rpc/sampling_params_proto.h"

#include <algorithm>

#include "common/config/token_ids.h"

namespace isobit {

SamplingParams SamplingParamsFromProto(const v1::SamplingParams& proto) {
  SamplingParams p;
  if (proto.has_temperature()) p.temperature = proto.temperature();
  if (proto.has_top_p()) p.top_p = proto.top_p();
  if (proto.has_top_k()) p.top_k = proto.top_k();
  if (proto.has_min_p()) p.min_p = proto.min_p();
  if (proto.has_seed()) p.seed = proto.seed();
  if (proto.has_n()) p.n = proto.n();
  if (proto.has_max_tokens()) p.max_tokens = proto.max_tokens();
  if (proto.has_min_tokens()) p.min_tokens = proto.min_tokens();
  p.stop_token_ids = TokenIdsFromWire(proto.stop_token_ids());
  if (proto.has_ignore_eos()) p.ignore_eos = proto.ignore_eos();
  if (proto.has_repetition_penalty()) p.repetition_penalty = proto.repetition_penalty();
  if (proto.has_presence_penalty()) p.presence_penalty = proto.presence_penalty();
  if (proto.has_frequency_penalty()) p.frequency_penalty = proto.frequency_penalty();
  p.logit_bias.reserve(proto.logit_bias().size());
  for (const auto& [id, bias] : proto.logit_bias()) {
    p.logit_bias.emplace_back(static_cast<int32_t>(id), bias);
  }
  std::sort(p.logit_bias.begin(), p.logit_bias.end());
  if (proto.has_logprobs()) p.logprobs = proto.logprobs();
  return p;
}

v1::SamplingParams SamplingParamsToProto(const SamplingParams& params) {
  v1::SamplingParams proto;
  proto.set_temperature(params.temperature);
  proto.set_top_p(params.top_p);
  proto.set_top_k(params.top_k);
  proto.set_min_p(params.min_p);
  if (params.seed) proto.set_seed(*params.seed);
  proto.set_n(params.n);
  proto.set_max_tokens(params.max_tokens);
  proto.set_min_tokens(params.min_tokens);
  for (const int32_t id : params.stop_token_ids) {
    proto.add_stop_token_ids(static_cast<uint32_t>(id));
  }
  proto.set_ignore_eos(params.ignore_eos);
  proto.set_repetition_penalty(params.repetition_penalty);
  proto.set_presence_penalty(params.presence_penalty);
  proto.set_frequency_penalty(params.frequency_penalty);
  for (const auto& [id, bias] : params.logit_bias) {
    (*proto.mutable_logit_bias())[static_cast<uint32_t>(id)] = bias;
  }
  proto.set_logprobs(params.logprobs);
  return proto;
}

}  // namespace isobit
