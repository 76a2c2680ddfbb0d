// Bounds of the sampling parameters. See sampling_params.h.
#include "common/config/sampling_params.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/status_macros.h"
#include "common/config/token_ids.h"

namespace isobit {
namespace {

template <typename T>
absl::Status Bad(absl::string_view field, T value, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": expected ", expected, ", got ", value));
}

// Written so that NaN fails.
absl::Status Within(absl::string_view field, float value, float low, float high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Bad(field, value, absl::StrCat("a number in [", low, ", ", high, "]"));
}

absl::Status AtMost(absl::string_view field, uint64_t value, uint64_t bound) {
  return value <= bound ? absl::OkStatus() : Bad(field, value, absl::StrCat("at most ", bound));
}

}  // namespace

absl::Status ValidateSamplingParams(const SamplingParams& p, const SamplingLimits& limits) {
  if (p.temperature != 0.0f && !(p.temperature >= 0.001f && p.temperature <= 1000.0f)) {
    return Bad("sampling.temperature", p.temperature, "0 or a number in [0.001, 1000]");
  }
  if (!(p.top_p > 0.0f && p.top_p <= 1.0f))
    return Bad("sampling.top_p", p.top_p, "a number in (0, 1]");
  if (p.top_k < -1) return Bad("sampling.top_k", p.top_k, "-1 or more");
  ISOBIT_RETURN_IF_ERROR(Within("sampling.min_p", p.min_p, 0.0f, 1.0f));
  ISOBIT_RETURN_IF_ERROR(
      Within("sampling.repetition_penalty", p.repetition_penalty, 0.01f, 100.0f));
  ISOBIT_RETURN_IF_ERROR(Within("sampling.presence_penalty", p.presence_penalty, -2.0f, 2.0f));
  ISOBIT_RETURN_IF_ERROR(Within("sampling.frequency_penalty", p.frequency_penalty, -2.0f, 2.0f));
  if (p.n == 0) return Bad("sampling.n", p.n, "1 or more");
  if (p.max_tokens == 0) return Bad("sampling.max_tokens", p.max_tokens, "1 or more");
  ISOBIT_RETURN_IF_ERROR(AtMost("sampling.n", p.n, limits.max_n));
  ISOBIT_RETURN_IF_ERROR(AtMost("sampling.logprobs", p.logprobs, limits.max_logprobs));
  ISOBIT_RETURN_IF_ERROR(
      AtMost("sampling.min_tokens (bound: max_tokens)", p.min_tokens, p.max_tokens));
  ISOBIT_RETURN_IF_ERROR(AtMost("number of sampling.stop_token_ids", p.stop_token_ids.size(),
                                limits.max_stop_token_ids));
  ISOBIT_RETURN_IF_ERROR(AtMost("number of sampling.logit_bias entries", p.logit_bias.size(),
                                limits.max_logit_biases));
  ISOBIT_RETURN_IF_ERROR(
      CheckTokenIds("sampling.stop_token_ids", p.stop_token_ids, limits.vocab_size));
  for (const auto& [id, bias] : p.logit_bias) {
    ISOBIT_RETURN_IF_ERROR(CheckTokenId("sampling.logit_bias key", id, limits.vocab_size));
    ISOBIT_RETURN_IF_ERROR(Within("sampling.logit_bias value", bias, -1000.0f, 1000.0f));
  }
  return absl::OkStatus();
}

}  // namespace isobit
