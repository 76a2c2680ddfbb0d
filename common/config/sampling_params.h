// Sampling parameters as the services use them: every default filled in, every bound checked. They
// are neither the wire message nor what kernels read (kernels/model/sampling.h makes that per row).
#ifndef ISOBIT_COMMON_CONFIG_SAMPLING_PARAMS_H_
#define ISOBIT_COMMON_CONFIG_SAMPLING_PARAMS_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace isobit {

// Names and meanings are those of vLLM; proto/isobit/v1/types.proto documents each, and docs/API.md
// says what differs.
struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy
  float top_p = 1.0f;
  int32_t top_k = 0;  // 0 or -1: all
  float min_p = 0.0f;
  std::optional<uint64_t> seed;
  uint32_t n = 1;
  uint32_t max_tokens = 16;
  uint32_t min_tokens = 0;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  std::vector<std::pair<int32_t, float>> logit_bias;  // by id, each id once
  uint32_t logprobs = 0;                              // alternatives to return at each position
};

struct SamplingLimits {
  int32_t vocab_size = 0;
  uint32_t max_n = 128;
  uint32_t max_logprobs = 64;
  size_t max_stop_token_ids = 256;
  size_t max_logit_biases = 1024;
};

// INVALID_ARGUMENT naming field, value and bound: temperature is neither 0 nor in [0.001, 1000];
// top_p not in (0, 1]; top_k below -1; min_p not in [0, 1]; repetition_penalty not in [0.01, 100];
// presence or frequency penalty not in [-2, 2]; a logit bias not in [-1000, 1000]; n or max_tokens
// is 0; n, logprobs or a list exceeds its limit; a token id is outside the vocabulary; min_tokens
// exceeds max_tokens; any value is NaN.
absl::Status ValidateSamplingParams(const SamplingParams& params, const SamplingLimits& limits);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CONFIG_SAMPLING_PARAMS_H_
